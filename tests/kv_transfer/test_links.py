"""The table of links over real shared-memory transports: one for each address, few for each worker."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from kv_transfer.links import MAX_LINKS_PER_WORKER, LinkTable
from kv_transfer.loopback import ShmTransport
from kv_transfer.shm_link import ShmLink
from kv_transfer.transport import MessageHeader, Transport
from kv_transfer.transports import make_transport
from tandem.errors import LinkClosed, TransportError
from tandem.types import Epoch, HandoffId, WorkerId

DECODE = WorkerId("decode-0")


class TakesNothing:
    """A sink to which every message is unknown."""

    def place(self, header: MessageHeader) -> None:
        return None

    def landed(self, header: MessageHeader, error: TransportError | None) -> None:
        raise AssertionError("nothing was placed")


@pytest.fixture
def lives() -> Iterator[list[Transport]]:
    """One worker's transports over several lives, each at an address of its own."""
    with ExitStack() as stack:
        transports = [
            stack.enter_context(closing(make_transport("shm", worker_id=DECODE)))
            for _ in range(MAX_LINKS_PER_WORKER + 2)
        ]
        for transport in transports:
            transport.serve(TakesNothing())
        yield transports


@pytest.fixture
def source() -> Iterator[Transport]:
    with closing(make_transport("shm", worker_id=WorkerId("prefill-0"))) as transport:
        yield transport


def header() -> MessageHeader:
    return MessageHeader(
        handoff_id=HandoffId("0" * 32), epoch=Epoch(1), layer=0, first_block=0, num_blocks=1, num_bytes=8, digest=0
    )


def test_an_address_has_one_link_however_often_and_at_once_it_is_asked_for(
    source: Transport, lives: list[Transport]
) -> None:
    async def scenario() -> None:
        table = LinkTable(source)
        address = lives[0].address()
        links = await asyncio.gather(*(table.get(DECODE, address, epoch=Epoch(1)) for _ in range(5)))
        assert len({id(link) for link, _ in links}) == 1
        table.close()

    asyncio.run(scenario())


def test_links_to_the_earlier_lives_of_a_worker_are_closed_and_others_are_not(
    source: Transport, lives: list[Transport]
) -> None:
    async def scenario() -> None:
        table = LinkTable(source)
        other, _ = await table.get(WorkerId("decode-1"), lives[0].address(), epoch=Epoch(1))
        links = [(await table.get(DECODE, life.address(), epoch=Epoch(n)))[0] for n, life in enumerate(lives[1:])]
        memory = [source.allocate(8)]
        with pytest.raises(LinkClosed):
            links[0].send(header(), memory).result(5)
        for link in [other, *links[1:]]:
            link.send(header(), memory).result(5)
        assert [known.worker_id for known in table.links()] == ["decode-1", *[DECODE] * MAX_LINKS_PER_WORKER]
        table.close()

    asyncio.run(scenario())


def test_a_link_that_was_dropped_is_opened_anew(source: Transport, lives: list[Transport]) -> None:
    async def scenario() -> None:
        table = LinkTable(source)
        first, _ = await table.get(DECODE, lives[0].address(), epoch=Epoch(1))
        table.drop(first)
        table.drop(first)
        assert table.links() == []
        second, _ = await table.get(DECODE, lives[0].address(), epoch=Epoch(1))
        assert second is not first
        second.send(header(), [source.allocate(8)]).result(5)
        table.close()

    asyncio.run(scenario())


class HeldUp(ShmTransport):
    """Connects when the test lets it."""

    def __init__(self) -> None:
        super().__init__(worker_id=WorkerId("prefill-0"))
        self.go = threading.Event()
        self.opened: list[ShmLink] = []

    def connect(self, address: bytes) -> ShmLink:
        assert self.go.wait(10)
        self.opened.append(super().connect(address))
        return self.opened[-1]


def test_a_link_for_which_nobody_waits_any_more_is_the_next_ones(lives: list[Transport]) -> None:
    async def scenario() -> None:
        table, address = LinkTable(source), lives[0].address()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await table.get(DECODE, address, epoch=Epoch(1))
        source.go.set()
        link, _ = await table.get(DECODE, address, epoch=Epoch(1))
        assert source.opened == [link]
        table.close()

    with closing(HeldUp()) as source:
        asyncio.run(scenario())


def test_a_link_that_opens_when_the_table_is_closed_is_closed_too(lives: list[Transport]) -> None:
    async def scenario() -> None:
        table = LinkTable(source)
        waiting = asyncio.ensure_future(table.get(DECODE, lives[0].address(), epoch=Epoch(1)))
        await asyncio.sleep(0)
        table.close()
        source.go.set()
        with pytest.raises(LinkClosed):
            await waiting
        with pytest.raises(LinkClosed):
            source.opened[0].send(header(), [source.allocate(8)]).result(5)

    with closing(HeldUp()) as source:
        asyncio.run(scenario())


def test_an_address_where_nobody_serves_opens_no_link(source: Transport) -> None:
    async def scenario() -> None:
        table = LinkTable(source)
        gone = make_transport("shm", worker_id=DECODE)
        gone.serve(TakesNothing())
        address = gone.address()
        gone.close()
        with pytest.raises(TransportError):
            await table.get(DECODE, address, epoch=Epoch(1))
        assert table.links() == []

    asyncio.run(scenario())
