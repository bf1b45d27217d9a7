"""Blocks of a handoff that was given up in the middle of a message: nobody has them while they may still be written."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from kv_transfer.destination import DestinationHandoff
from kv_transfer.digest import digest
from kv_transfer.incoming import IncomingHandoff, ReceiveCallbacks
from kv_transfer.offer import TicketOffice
from kv_transfer.receiver import HandoffReceiver
from kv_transfer.ticket import Claims
from kv_transfer.transport import MessageHeader
from kv_transfer.transports import make_transport
from tandem.errors import HandoffFailed, RequestCancelled
from tandem.kv.block_pool import BlockPool
from tandem.kv.cache import KvCache
from tandem.kv.layout import KvLayout
from tandem.rpc.tandem.v1 import worker_pb2
from tandem.types import BlockId, Epoch, RequestId, WorkerId
from tests.factories import CLUSTER_KEY
from tests.fakes import HeldUpTransport
from tests.kv_transfer.peers import FAR_UCX, HANDOFF, TIMEOUT_S, Peer, name_of, stop_forks

EPOCH = Epoch(3)
LEASE_S = 600.0
"""Nothing here ends by it."""
LAYOUT = KvLayout(num_layers=1, num_kv_heads=4, head_dim=64, block_size=2048, dtype="float32")
"""Blocks of 4 MiB: no socket holds one, a sender that stands still has not sent it."""
CLAIMS = Claims(
    handoff_id=HANDOFF,
    request_id=RequestId("victim"),
    source=WorkerId("prefill"),
    source_epoch=Epoch(2),
    destination=WorkerId("decode"),
    destination_epoch=EPOCH,
    expires_s=time.time() + 86_400,  # this module may be read long before its tests run
)


@pytest.fixture(params=["shm", "ucx", "collective", FAR_UCX])
def kind(request: pytest.FixtureRequest) -> str:
    """The sender's transport, and where it says that it is."""
    return str(request.param)


@pytest.fixture(autouse=True, scope="module")
def _no_process_is_left() -> Iterator[None]:
    yield
    stop_forks()


class Destination:
    """A decode worker's memory of two blocks, all of it reserved for one handoff. Made in an event loop."""

    def __init__(self, transport: HeldUpTransport, *, is_scattered: bool) -> None:
        """The prompt's blocks lie in one piece, or scattered in two."""
        self.transport = transport
        self.pool = BlockPool(2)
        self.released = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._cache = KvCache(LAYOUT, 2, transport.allocate(LAYOUT.slab_bytes(2)))
        office = TicketOffice(CLUSTER_KEY, worker_id=CLAIMS.destination, epoch=EPOCH)
        self._receiver = HandoffReceiver(cache=self._cache, transport=transport, office=office)
        self.handoff = self.open()
        blocks = self.pool.allocate(2)
        assert blocks is not None
        self._blocks = blocks[::-1] if is_scattered else blocks
        self.handoff.reserved(self._blocks)

    @property
    def blocks(self) -> tuple[BlockId, ...]:
        """All of them."""
        return self._blocks

    def open(self) -> IncomingHandoff:
        """A handoff of these claims, known to the transport's thread."""
        lanes, now = self._receiver.lanes_from(CLAIMS), time.monotonic()
        handoff = IncomingHandoff(
            claims=CLAIMS,
            machine=DestinationHandoff(epoch=EPOCH, lanes=lanes, num_blocks=2, lease_s=LEASE_S, now=now),
            desk=self._receiver,
            callbacks=ReceiveCallbacks(
                delivered=lambda record: None, failed=lambda error: None, released=self._on_released
            ),
            now=time.time(),
        )
        self._receiver.open(handoff)
        return handoff

    def _on_released(self) -> None:
        self.pool.release(self._blocks)
        self._loop.call_soon_threadsafe(self.released.set)

    @property
    def header(self) -> MessageHeader:
        """Of what an honest source sends, the whole prompt in one message, all of it sevens."""
        num_bytes = LAYOUT.slab_bytes(2)
        honest = MessageHeader(
            handoff_id=HANDOFF,
            epoch=EPOCH,
            layer=0,
            first_block=0,
            num_blocks=2,
            num_heads=LAYOUT.num_kv_heads,
            num_bytes=num_bytes,
            digest=digest([torch.full((num_bytes,), 7, dtype=torch.uint8)]),
        )
        return honest.sealed(self._receiver.link_key(CLAIMS))

    async def given_to_another(self) -> None:
        """Waits until the blocks are free; the next request has them then, and writes ones."""
        async with asyncio.timeout(TIMEOUT_S):
            await self.released.wait()
        assert self.pool.allocate(2) is not None
        self._cache.slab.fill_(1)

    async def still_anothers(self) -> bool:
        """Whether nothing that the transport had yet to do has touched them."""
        await asyncio.wrap_future(self.transport.quiesce(HANDOFF))
        return bool((self._cache.slab == 1).all())


@contextmanager
def message_placed(kind: str, *, is_scattered: bool) -> Iterator[tuple[Destination, Peer]]:
    """A destination at the moment in which a sender's message has its place, and no byte has been written."""
    transport = HeldUpTransport(make_transport(name_of(kind), worker_id=CLAIMS.destination))
    try:
        destination = Destination(transport, is_scattered=is_scattered)
        with Peer(kind, "send one", transport.address().hex(), destination.header.pack().hex()) as peer:
            assert transport.placed.wait(TIMEOUT_S)
            yield destination, peer
    finally:
        transport.close()


SCATTERED = pytest.mark.parametrize("is_scattered", [False, True], ids=["contiguous", "scattered"])


@SCATTERED
@pytest.mark.parametrize("says_drained", [False, True])
def test_blocks_into_which_a_message_may_still_be_written_are_nobody_elses(
    kind: str, is_scattered: bool, says_drained: bool
) -> None:
    async def given_up() -> None:
        with message_placed(kind, is_scattered=is_scattered) as (destination, peer):
            if says_drained:
                destination.handoff.on_message(worker_pb2.SourceMessage(abort=worker_pb2.HandoffAbort(epoch=EPOCH)))
                destination.handoff.on_message(worker_pb2.SourceMessage(drained=worker_pb2.HandoffDrained(epoch=EPOCH)))
            else:
                destination.handoff.peer_lost("the control stream was closed")
            assert destination.pool.num_free == 0
            destination.transport.go()
            await destination.given_to_another()
            assert await asyncio.to_thread(peer.read) == "sent"
            assert await destination.still_anothers()

    asyncio.run(given_up())


@SCATTERED
def test_a_writer_that_is_stopped_in_a_message_neither_keeps_the_blocks_nor_writes_them_later(
    kind: str, is_scattered: bool
) -> None:
    async def stopped() -> None:
        with message_placed(kind, is_scattered=is_scattered) as (destination, peer):
            peer.stop()
            destination.transport.go()
            destination.handoff.peer_lost("the control stream was closed")
            await destination.given_to_another()
            peer.signal(signal.SIGCONT)
            assert await asyncio.to_thread(peer.read) == "sent"
            assert await destination.still_anothers()

    asyncio.run(stopped())


@contextmanager
def destination() -> Iterator[Destination]:
    transport = HeldUpTransport(make_transport("shm", worker_id=CLAIMS.destination))
    try:
        yield Destination(transport, is_scattered=False)
    finally:
        transport.close()


def test_an_id_that_is_in_use_is_not_opened_a_second_time() -> None:
    async def twice() -> None:
        with destination() as first, pytest.raises(HandoffFailed, match="open already"):
            first.open()

    asyncio.run(twice())


def test_blocks_that_are_reserved_for_a_handoff_that_has_ended_come_back_at_once() -> None:
    async def late() -> None:
        with destination() as there:
            there.handoff.peer_lost("the control stream was closed")
            await there.released.wait()
            ended = there.open()
            ended.abort(RequestCancelled("the client has gone"))
            taken = there.pool.allocate(2)
            assert taken == there.blocks
            ended.reserved(taken)
            assert there.pool.num_free == 2

    asyncio.run(late())
