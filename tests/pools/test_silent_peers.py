"""Peers that fall silent or die: each side frees its blocks by its own clock, and what comes later is not written."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from kv_transfer.handoff import combined_digest
from kv_transfer.offer import TicketOffice
from kv_transfer.ticket import Reach
from kv_transfer.transport import MessageHeader, Transport
from kv_transfer.transports import make_transport
from tandem.config import TransportName
from tandem.errors import HandoffFailed, TandemError
from tandem.rpc.server import start_server
from tandem.rpc.tandem.v1 import worker_pb2, worker_pb2_grpc
from tandem.types import Epoch, WorkerId
from tests.factories import CLUSTER_KEY
from tests.fakes import Fault
from tests.legs import Legs
from tests.pair import Pair, PairOptions, make_prompt, monolithic, running_pair, until
from tests.silent_source import silent_source

TRANSPORTS: list[TransportName] = ["shm", "ucx"]
PROMPT = make_prompt(20)


def holds(cache: torch.Tensor) -> int:
    """Bytes that only `SilentSource` writes in such numbers."""
    return int((cache == 7).sum())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_prefill_worker_that_falls_silent_loses_its_lease_and_its_late_message_is_not_written(
    gqa: Path, transport: TransportName
) -> None:
    async def silent() -> None:
        async with (
            running_pair(gqa, PairOptions(transport=transport, lease_s=1.0)) as pair,
            silent_source(pair) as (legs, source),
        ):
            await source.send(layer=0, first_block=0)
            await until(lambda: holds(pair.decode.executor.cache.slab) > 1000)
            error = await legs.decode.error()
            assert type(error) is HandoffFailed
            assert "lease" in error.message
            await pair.settled()
            before = pair.decode.executor.cache.slab.clone()
            await source.send(layer=1, first_block=0)
            await source.send(layer=0, first_block=1)
            assert torch.equal(pair.decode.executor.cache.slab, before)

    asyncio.run(silent())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_late_messages_do_not_reach_the_request_that_has_the_blocks_now(gqa: Path, transport: TransportName) -> None:
    options = PairOptions(transport=transport, decode_blocks=3, lease_s=1.0)

    async def late() -> list[int]:
        async with running_pair(gqa, options) as pair, silent_source(pair) as (legs, source):
            assert isinstance(await legs.decode.error(), HandoffFailed)
            pair.decode_executor.stop()
            heir = asyncio.create_task(pair.run(PROMPT))
            await until(pair.decode_executor.stopped.is_set)
            for layer in range(3):
                for block in range(3):
                    await source.send(layer=layer, first_block=block)
            pair.decode_executor.go()
            return await heir

    assert asyncio.run(late()) == monolithic(gqa, PROMPT)


def test_a_renewed_lease_does_not_run_out(gqa: Path) -> None:
    options = PairOptions(lease_s=1.0)

    async def renewed() -> None:
        async with running_pair(gqa, options) as pair, silent_source(pair) as (legs, source):
            for _ in range(6):
                await source.call.write(worker_pb2.SourceMessage(renew=worker_pb2.LeaseRenewal(epoch=4)))
                assert (await source.call.read()).WhichOneof("message") == "renewed"
                await asyncio.sleep(options.lease_s / 4)
            assert not legs.decode.task.done()
            source.call.cancel()
            assert type(await legs.decode.error()) is HandoffFailed

    asyncio.run(renewed())


def test_a_prefill_worker_that_does_not_say_drained_is_fenced_though_it_renews(gqa: Path) -> None:
    options = PairOptions(lease_s=1.0)

    async def stubborn() -> None:
        async with running_pair(gqa, options) as pair, silent_source(pair) as (legs, source):
            legs.decode.close()
            while (answer := await source.call.read()) is not grpc.aio.EOF:
                if answer.WhichOneof("message") == "renewed":
                    await asyncio.sleep(options.lease_s / 4)
                try:
                    await source.call.write(worker_pb2.SourceMessage(renew=worker_pb2.LeaseRenewal(epoch=4)))
                except asyncio.InvalidStateError:
                    break  # the stream has ended meanwhile
            await pair.settled()

    asyncio.run(asyncio.wait_for(stubborn(), 20))


def test_a_record_whose_first_token_cannot_be_fails_its_request_and_gives_the_blocks_back(gqa: Path) -> None:
    async def impossible() -> None:
        async with running_pair(gqa) as pair, silent_source(pair) as (legs, source):
            spots = [(layer, block) for layer in range(3) for block in range(3)]
            sent = [await source.send(layer=layer, first_block=block) for layer, block in spots]
            record = worker_pb2.HandoffRecord(
                epoch=source.ticket.epoch,
                first_tokens=[worker_pb2.FirstToken(token_id=1 << 20)],
                num_messages=len(sent),
                digest=combined_digest(header.digest for header in sent),
            )
            await source.call.write(worker_pb2.SourceMessage(record=record))
            error = await legs.decode.error()
            assert type(error) is HandoffFailed
            assert "first tokens" in error.message
            await pair.settled()
            assert await pair.run(PROMPT) == monolithic(gqa, PROMPT)

    asyncio.run(impossible())


def test_a_prefill_worker_that_dies_is_one_requests_failure(gqa: Path) -> None:
    async def dies() -> None:
        async with running_pair(gqa, PairOptions(lease_s=60.0)) as pair:
            other = asyncio.create_task(pair.run(PROMPT, max_tokens=20))
            async with silent_source(pair) as (legs, source):
                await source.send(layer=0, first_block=0)
                source.call.cancel()
                assert type(await legs.decode.error()) is HandoffFailed
            assert await other == monolithic(gqa, PROMPT, max_tokens=20)

    asyncio.run(dies())


class TakesNothing:
    """A sink to which every message is unknown."""

    def place(self, header: MessageHeader) -> None:
        return None

    def landed(self, header: MessageHeader, error: TandemError | None) -> None:
        raise AssertionError("nothing was placed")


class SilentDestination(worker_pb2_grpc.DecodeWorkerServicer):
    """A decode worker that gives a ticket, or not even that, and then says nothing more."""

    def __init__(self, transport: Transport, *, with_ticket: bool, lease_s: float) -> None:
        self._transport = transport
        self._with_ticket = with_ticket
        self._lease_s = lease_s
        self._office = TicketOffice(CLUSTER_KEY, worker_id=WorkerId("silent"), epoch=Epoch(9))
        self.heard: list[str] = []
        self.may_end = asyncio.Event()

    def Decode(self, request: Any, context: Any) -> AsyncIterator[worker_pb2.DecodeEvent]:
        raise AssertionError("nobody opens a decode leg here")

    async def Handoff(self, request_iterator: Any, context: Any) -> AsyncIterator[worker_pb2.DestinationMessage]:
        async for message in request_iterator:
            kind = message.WhichOneof("message")
            self.heard.append(kind)
            if kind == "offer" and self._with_ticket:
                claims = self._office.take(message.offer, now=time.time())
                ticket = self._office.ticket(
                    claims,
                    first_block=0,
                    lease_s=self._lease_s,
                    transport=self._transport.name,
                    reach=Reach(addresses=(self._transport.address(),)),
                )
                yield worker_pb2.DestinationMessage(ticket=ticket)
        await self.may_end.wait()


@asynccontextmanager
async def silent_destination(
    transport_name: TransportName, *, with_ticket: bool, lease_s: float = 1.0
) -> AsyncIterator[tuple[SilentDestination, str]]:
    transport = make_transport(transport_name, worker_id=WorkerId("silent"))
    transport.serve(TakesNothing())
    servicer = SilentDestination(transport, with_ticket=with_ticket, lease_s=lease_s)
    server = await start_server(
        "127.0.0.1", 0, lambda s: worker_pb2_grpc.add_DecodeWorkerServicer_to_server(servicer, s), ()
    )
    try:
        yield servicer, server.address
    finally:
        servicer.may_end.set()
        await server.stop(0.0)
        transport.close()


async def leg_to(pair: Pair, address: str) -> TandemError:
    legs = Legs(pair, PROMPT)
    legs.target.decode_address, legs.target.decode_worker_id = address, "silent"
    legs.target.decode_epoch = 9
    error = await legs.open_prefill().error()
    assert error is not None
    return error


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("with_ticket", [False, True])
@pytest.mark.parametrize("stuck", [False, True])
def test_a_decode_worker_that_falls_silent_is_given_up_after_a_lease(
    gqa: Path, transport: TransportName, with_ticket: bool, stuck: bool
) -> None:
    def policy(header: MessageHeader, index: int) -> Fault:
        return Fault.DELAY if stuck and header.epoch == 9 else Fault.NONE

    async def silent() -> None:
        options = PairOptions(transport=transport, faults=policy, lease_s=1.0)
        async with (
            running_pair(gqa, options) as pair,
            silent_destination(transport, with_ticket=with_ticket) as (
                servicer,
                address,
            ),
        ):
            error = await leg_to(pair, address)
            assert type(error) is HandoffFailed
            assert "silent" in error.message
            await until(lambda: "abort" in servicer.heard)
            assert "renew" in servicer.heard
            await until(lambda: pair.prefill.scheduler.pool.num_free == pair.prefill.scheduler.pool.num_blocks)
            assert pair.fabric.num_held == 0
            assert await pair.run(PROMPT) == monolithic(gqa, PROMPT)

    asyncio.run(silent())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_decode_worker_that_dies_fails_the_leg_at_once(gqa: Path, transport: TransportName) -> None:
    def policy(header: MessageHeader, index: int) -> Fault:
        return Fault.DELAY if header.epoch == 9 else Fault.NONE

    async def dies() -> None:
        options = PairOptions(transport=transport, faults=policy, lease_s=30.0)
        async with running_pair(gqa, options) as pair:
            async with silent_destination(transport, with_ticket=True, lease_s=30.0) as (_, address):
                leg = asyncio.create_task(leg_to(pair, address))
                await until(lambda: pair.fabric.num_held > 0)
            error = await leg
            assert error.code in ("handoff_failed", "worker_unavailable", "cancelled"), error.code
            assert await pair.run(PROMPT) == monolithic(gqa, PROMPT)

    asyncio.run(dies())
