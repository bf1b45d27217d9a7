"""Links are measured when they are opened; a slow one is said, or refused; auto takes one that works."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import pytest
import torch

from kv_transfer.auto import AutoTransport
from kv_transfer.links import LinkTable
from kv_transfer.loopback import ShmTransport
from kv_transfer.probe import ProbeSink
from kv_transfer.shm_link import ShmLink
from kv_transfer.transport import MessageHeader, Transport
from kv_transfer.transports import make_transport
from tandem.errors import LinkTooSlow, TransportError
from tandem.types import Epoch, WorkerId
from tests.kv_transfer.peers import TIMEOUT_S, RecordingSink, make_header

PEER = WorkerId("decode-0")
IMPOSSIBLE_GBPS = 1e6


@pytest.fixture
def ends() -> Iterator[tuple[Transport, Transport, RecordingSink]]:
    source, destination = (ShmTransport(worker_id=WorkerId(name)) for name in ("source", "destination"))
    sink = RecordingSink(destination.allocate(1000))
    destination.serve(ProbeSink(sink, destination))
    yield source, destination, sink
    source.close()
    destination.close()


def test_a_link_is_measured_once_and_its_probe_is_nobodys_traffic(
    ends: tuple[Transport, Transport, RecordingSink],
) -> None:
    source, destination, sink = ends

    async def body() -> None:
        links = LinkTable(source)
        link, speed = await links.get(PEER, destination.address(), epoch=Epoch(1))
        assert speed.bytes_per_s > 0
        assert speed.latency_s > 0
        assert await links.get(PEER, destination.address(), epoch=Epoch(1)) == (link, speed)
        memory = source.allocate(1000)
        link.send(make_header([memory]), [memory]).result(TIMEOUT_S)
        [known] = links.links()
        assert (known.stats().num_messages, known.stats().num_bytes) == (1, 1000)
        assert not known.slow
        links.close()

    asyncio.run(body())
    assert len(sink.placed) == 1


def test_a_link_below_the_floor_is_used_and_said(
    ends: tuple[Transport, Transport, RecordingSink], caplog: pytest.LogCaptureFixture
) -> None:
    source, destination, _ = ends

    async def body() -> None:
        links = LinkTable(source, min_gbps=IMPOSSIBLE_GBPS)
        await links.get(PEER, destination.address(), epoch=Epoch(1))
        assert [known.slow for known in links.links()] == [True]
        links.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(body())
    assert "slow link: shm (memfd) to decode-0" in caplog.text


def test_a_link_below_the_floor_is_refused_when_strict(ends: tuple[Transport, Transport, RecordingSink]) -> None:
    source, destination, _ = ends

    async def body() -> None:
        links = LinkTable(source, min_gbps=IMPOSSIBLE_GBPS, strict=True)
        with pytest.raises(LinkTooSlow, match=r"transfer\.strict"):
            await links.get(PEER, destination.address(), epoch=Epoch(1))
        assert links.links() == []

    asyncio.run(body())


class Unreachable(ShmTransport):
    """Serves, but nobody gets through to it."""

    name = "ucx"

    def connect(self, address: bytes) -> None:  # type: ignore[override]
        raise TransportError("no route")


class SlowLink:
    """A link that takes its time for each message."""

    transport, detail = "slow", ""

    def __init__(self, link: ShmLink) -> None:
        self._link = link
        self.close, self.stats = link.close, link.stats

    def send(self, header: MessageHeader, segments: Sequence[torch.Tensor]) -> Future[None]:
        time.sleep(0.02)
        return self._link.send(header, segments)


class Slow(ShmTransport):
    """Its links are slow ones."""

    name = "slow"

    def connect(self, address: bytes) -> SlowLink:  # type: ignore[override]
        return SlowLink(super().connect(address))


@pytest.mark.parametrize("names", [("slow", "shm"), ("shm", "slow")])
def test_auto_takes_the_quicker_link_and_closes_the_other(names: tuple[str, str]) -> None:
    kinds = {"slow": Slow, "shm": ShmTransport}
    here, there = (
        AutoTransport({name: kinds[name](worker_id=WorkerId("w")) for name in names}) for _ in ("here", "there")
    )
    try:
        there.serve(RecordingSink(there.allocate(10)))
        link = here.connect(there.address())
        assert link.transport == "shm"
        memory = here.allocate(10)
        link.send(make_header([memory]), [memory]).result(TIMEOUT_S)
    finally:
        here.close()
        there.close()


def test_auto_goes_without_a_transport_that_does_not_reach_the_peer() -> None:
    here, there = (
        AutoTransport({"ucx": Unreachable(worker_id=name), "shm": make_transport("shm", worker_id=name)})
        for name in (WorkerId("here"), WorkerId("there"))
    )
    try:
        there.serve(RecordingSink(there.allocate(10)))
        assert here.connect(there.address()).transport == "shm"
    finally:
        here.close()
        there.close()


def test_auto_says_why_no_transport_joins_two_workers() -> None:
    here, there = (AutoTransport({"ucx": Unreachable(worker_id=WorkerId(name))}) for name in ("here", "there"))
    try:
        there.serve(RecordingSink(there.allocate(10)))
        with pytest.raises(TransportError, match="ucx: no route"):
            here.connect(there.address())
    finally:
        here.close()
        there.close()
