"""A real Ray head that hands over, and what runs beside one: a controller, a probe, a node that is closed."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from redis import Redis

from cluster import head as head_module
from cluster.embedded_redis import EmbeddedRedis
from cluster.head import HeadOptions, RayHead
from cluster.head_record import HeadRecord, HeadRecords
from cluster.node_drain import close_node
from cluster.probe import Question, ask
from cluster.raylet import Raylet, raylets
from tandem.config import ClusterConfig
from tandem.errors import ConfigError
from tandem.types import Role
from tests.metadata import CLUSTER, state_of, valkey
from tests.router_harness import runs_within

LIMIT_S = 200
HEAD_IP = "127.0.0.6"
"""Of no other test: a probe asks whatever Ray node it finds at an address."""


@asynccontextmanager
async def running_head(server: EmbeddedRedis, *, hands_over: bool) -> AsyncIterator[str]:
    """A head that nodes may join; its address."""
    options = HeadOptions(joinable=True, node_ip=HEAD_IP, slots={}, hands_over=hands_over)
    head = RayHead(options, cluster=CLUSTER, log=None)
    address = await head.start(server.url, is_external=True)
    supervising = asyncio.create_task(head.supervise(lambda _: None))
    try:
        yield address
    finally:
        supervising.cancel()
        await asyncio.gather(supervising, return_exceptions=True)
        assert await head.stop() == []


async def record_of(server: EmbeddedRedis) -> HeadRecord | None:
    records = HeadRecords(server.url, cluster=CLUSTER)
    try:
        return await records.get()
    finally:
        await records.close()


def keys_of_ray(server: EmbeddedRedis) -> list[str]:
    with Redis.from_url(server.url, decode_responses=True) as redis:
        return [key for key in redis.scan_iter() if key.startswith("RAY")]


def raylet_of(head: str) -> Raylet:
    """The one node of this head."""
    (found,) = [raylet for raylet in raylets() if raylet.gcs_address == head]
    return found


@asynccontextmanager
async def controller_beside(server: EmbeddedRedis, ray_address: str, sizes: Path) -> AsyncIterator[str]:
    """`tandem controller`; the URL of its metrics. It must end with status 0 when it is told to."""
    with socket.create_server((HEAD_IP, 0)) as probe:
        port = probe.getsockname()[1]
    where = ["--cluster", CLUSTER, "--redis-url", server.url, "--ray-address", ray_address]
    arguments = ["controller", *where, "--sizes-file", str(sizes), "--metrics-port", str(port)]
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "cluster.cli", *arguments)
    try:
        yield f"http://{HEAD_IP}:{port}/metrics"
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def until_acting(url: str) -> None:
    async with httpx.AsyncClient(trust_env=False, verify=False) as http:
        while True:
            try:
                if "tandem_controller_lease_held 1.0" in (await http.get(url)).text:
                    return
            except httpx.TransportError:
                pass  # it has not begun to listen
            await asyncio.sleep(0.1)


async def until_put_back(server: EmbeddedRedis) -> HeadRecord:
    while (record := await record_of(server)) is None:  # noqa: ASYNC110  the head looks from time to time
        await asyncio.sleep(0.05)
    return record


@pytest.mark.slow
@runs_within(LIMIT_S)
async def test_a_head_that_hands_over_leaves_all_to_the_next_one_and_one_that_does_not_forgets_it(
    tmp_path: Path,
) -> None:
    sizes = tmp_path / "sizes.yaml"
    await asyncio.to_thread(sizes.write_text, "prefill: 0\ndecode: 0\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_module, "_RECORD_PERIOD_S", 0.1)
        async with valkey() as server, state_of(server) as state:
            async with running_head(server, hands_over=True) as address:
                first = await record_of(server)
                assert first is not None
                with Redis.from_url(server.url) as redis:
                    redis.delete(f"tandem:{CLUSTER}:head")
                assert await until_put_back(server) == first

                async with controller_beside(server, address, sizes) as metrics:
                    await until_acting(metrics)
                    desired = await state.get()
                    assert [pool and pool.size for pool in (desired.prefill, desired.decode)] == [0, 0]

                assert await ask(Question.LIVE, ClusterConfig(), node_ip=HEAD_IP)
                assert raylet_of(address).node_ip == HEAD_IP

            assert await record_of(server) == first
            assert keys_of_ray(server)
            async with running_head(server, hands_over=False) as address:
                assert address == first.address
                assert (await record_of(server)) == first
                assert await asyncio.to_thread(close_node, raylet_of(address))
            assert await record_of(server) is None
            assert keys_of_ray(server) == []


def test_handing_over_needs_others_to_hand_over_to_and_a_redis_that_stays() -> None:
    with pytest.raises(ConfigError, match="nothing to hand over"):
        HeadOptions(hands_over=True)
    head = RayHead(HeadOptions(joinable=True, slots=dict.fromkeys(Role, 0), hands_over=True), cluster="x", log=None)
    with pytest.raises(ConfigError, match="needs a Redis that outlives it"):
        asyncio.run(head.start("redis://127.0.0.1:1/0", is_external=False))
