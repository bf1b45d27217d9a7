"""The process around a worker, in this process: registered, renewed, drained and gone, with a real Redis."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from cluster.embedded_redis import EmbeddedRedis
from decode_pool.actor import DecodeActor
from prefill_pool.actor import PrefillActor
from tandem.config import from_mapping, to_mapping
from tandem.errors import ModelLoadError, TandemError, WorkerUnavailable
from tandem.key_source import KEY_VARIABLE
from tandem.registry import Registry, WorkerRecord
from tandem.rpc.authentication import SignedChannel
from tandem.rpc.client import open_channel
from tandem.rpc.convert import decode_request_to_proto, prefill_request_to_proto
from tandem.rpc.status import from_rpc_error
from tandem.rpc.tandem.v1 import worker_pb2, worker_pb2_grpc
from tandem.types import HandoffId
from tests.factories import CLUSTER_KEY, make_request
from tests.pair import BLOCK_SIZE

Actor = type[PrefillActor] | type[DecodeActor]
HANDOFF = 32 * "a"
ACTORS: list[Actor] = [PrefillActor, DecodeActor]


@pytest.fixture(autouse=True)
def cluster_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, CLUSTER_KEY.to_hex())


def settings(model: Path | str, redis_url: str) -> dict[str, Any]:
    config = from_mapping(
        {
            "cluster": "hosts",
            "model": {"source": str(model), "block_size": BLOCK_SIZE},
            "prefill": {"num_blocks": 16, "num_threads": 1},
            "decode": {"num_blocks": 16, "num_threads": 1},
            "transfer": {"transport": "shm"},
            "registry": {"heartbeat_s": 0.05, "ttl_s": 0.5},
        }
    )
    return {
        "config": to_mapping(config),
        "worker_id": "worker-7",
        "redis_url": redis_url,
        "host": "127.0.0.1",
        "cores": (),
    }


def signed_channel(address: str) -> SignedChannel:
    return SignedChannel(open_channel(address), key=CLUSTER_KEY, address=address)


@asynccontextmanager
async def registry() -> AsyncIterator[tuple[EmbeddedRedis, Registry]]:
    server = EmbeddedRedis()
    await server.start()
    client = Registry(server.url, cluster="hosts", ttl_s=0.5)
    try:
        yield server, client
    finally:
        await client.close()
        server.stop()


async def lose_everything(server: EmbeddedRedis) -> None:
    """Kills the server and starts it again, empty, on the same port."""
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    await server.wait()
    await server.start()


async def only_record(server: EmbeddedRedis) -> list[WorkerRecord]:
    """What is registered, as soon as anything is; asked on a connection of its own."""
    client = Registry(server.url, cluster="hosts", ttl_s=0.5)
    try:
        for _ in range(500):
            if found := await client.workers():
                return found
            await asyncio.sleep(0.01)
    finally:
        await client.close()
    raise AssertionError("nobody registered")


@pytest.mark.parametrize("make", ACTORS)
def test_a_worker_registers_drains_and_deregisters(gqa: Path, make: Actor) -> None:
    async def life() -> None:
        async with registry() as (server, client):
            actor = make(settings(gqa, server.url))
            try:
                ready = await asyncio.to_thread(actor.ready)
                [record] = await client.workers()
                assert (record.worker_id, record.state, record.pid) == ("worker-7", "ready", os.getpid())
                assert (record.address, record.role) == (ready["address"], ready["role"])
                assert (record.num_blocks, record.load.num_free_blocks) == (16, 16)
                async with signed_channel(record.address) as channel:
                    status = await worker_pb2_grpc.WorkerStub(channel).GetStatus(worker_pb2.GetStatusRequest())
                assert (status.worker_id, status.epoch) == ("worker-7", record.epoch)
                await asyncio.sleep(0.8)
                assert [r.worker_id for r in await client.workers()] == ["worker-7"], "outlives its TTL by heartbeats"
                assert await asyncio.to_thread(actor.drain, 5.0)
                assert [r.state for r in await client.workers()] == ["draining"]
            finally:
                await asyncio.to_thread(actor.stop)
            assert await client.workers() == []
            async with signed_channel(record.address) as channel:
                with pytest.raises(grpc.aio.AioRpcError):
                    await worker_pb2_grpc.WorkerStub(channel).GetStatus(worker_pb2.GetStatusRequest(), timeout=2.0)

    asyncio.run(life())


def test_a_worker_registers_again_by_heartbeat_when_redis_has_lost_everything(gqa: Path) -> None:
    async def restart() -> None:
        async with registry() as (server, client):
            actor = DecodeActor(settings(gqa, server.url))
            try:
                await asyncio.to_thread(actor.ready)
                [before] = await client.workers()
                await lose_everything(server)
                [after] = await only_record(server)
                assert (after.worker_id, after.epoch) == (before.worker_id, before.epoch)
            finally:
                await asyncio.to_thread(actor.stop)

    asyncio.run(restart())


def test_a_worker_that_starts_after_redis_has_lost_everything_is_a_later_incarnation(gqa: Path) -> None:
    async def restart() -> None:
        async with registry() as (server, client):
            epochs = [await client.next_epoch() for _ in range(3)]
            await lose_everything(server)
            actor = DecodeActor(settings(gqa, server.url))
            try:
                await asyncio.to_thread(actor.ready)
                [record] = await only_record(server)
                assert record.epoch > max(epochs)
            finally:
                await asyncio.to_thread(actor.stop)

    asyncio.run(restart())


def test_a_worker_stops_though_redis_is_away(gqa: Path) -> None:
    async def away() -> None:
        async with registry() as (server, _):
            actor = PrefillActor(settings(gqa, server.url))
            await asyncio.to_thread(actor.ready)
            server.stop()
            await asyncio.to_thread(actor.stop)

    asyncio.run(away())


async def first_error(actor: PrefillActor | DecodeActor, silent: socket.socket) -> TandemError:
    """Of a request that has not ended when its worker is stopped; a peer listens at `silent`, and says nothing."""
    ready = await asyncio.to_thread(actor.ready)
    request = make_request(num_prompt_tokens=20, max_tokens=8)
    accepted = asyncio.Event()

    async def run(channel: SignedChannel) -> None:
        if isinstance(actor, DecodeActor):
            message = decode_request_to_proto(request, now=time.monotonic(), handoff_id=HandoffId(HANDOFF))
            async for _ in worker_pb2_grpc.DecodeWorkerStub(channel).Decode(message):
                accepted.set()
        else:
            peer = f"127.0.0.1:{silent.getsockname()[1]}"
            target = worker_pb2.HandoffTarget(
                handoff_id=HANDOFF, decode_worker_id="decode-0", decode_address=peer, decode_epoch=1
            )
            message = prefill_request_to_proto(request, now=time.monotonic(), handoff=target)
            async for _ in worker_pb2_grpc.PrefillWorkerStub(channel).Prefill(message):
                pass

    async with signed_channel(ready["address"]) as channel, contextlib.AsyncExitStack() as ends:
        running = asyncio.create_task(run(channel))
        if isinstance(actor, DecodeActor):
            await asyncio.wait_for(accepted.wait(), 20.0)
        else:  # it asks the peer for a ticket
            connection, _ = await asyncio.to_thread(silent.accept)
            ends.enter_context(connection)
        assert not await asyncio.to_thread(actor.drain, 0.2)
        await asyncio.to_thread(actor.stop)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await running
    assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
    return from_rpc_error(ended.value)


@pytest.mark.parametrize("make", ACTORS)
def test_a_request_that_the_drains_deadline_cuts_off_is_told_that_its_worker_shut_down(
    gqa: Path, make: Actor
) -> None:
    async def cut_off() -> None:
        async with registry() as (server, _):
            with socket.create_server(("127.0.0.1", 0)) as silent:
                silent.settimeout(20.0)
                error = await first_error(make(settings(gqa, server.url)), silent)
        assert isinstance(error, WorkerUnavailable)
        assert "worker-7 is stopping: it shut down before the request ended" in error.message

    asyncio.run(cut_off())


def test_a_model_that_cannot_be_loaded_is_told_by_ready_and_the_worker_can_be_stopped(tmp_path: Path) -> None:
    async def no_model() -> None:
        async with registry() as (server, client):
            actor = PrefillActor(settings(tmp_path, server.url))
            with pytest.raises(ModelLoadError):
                await asyncio.to_thread(actor.ready)
            await asyncio.to_thread(actor.stop)
            assert await client.workers() == []

    asyncio.run(no_model())
