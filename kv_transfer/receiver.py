"""Drives destination handoffs: the transport's sink, and the decode worker's end of the control streams.

Owns the table of open handoffs and the order of IO; every decision is `destination.DestinationHandoff`'s. One lock
per handoff guards its machine; callbacks run under it, so a callback's owner must not call a handoff while it holds a
lock that its own callbacks take.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import torch

from kv_transfer.destination import DestinationHandoff
from kv_transfer.handoff import (
    Action,
    BlockRange,
    Deliver,
    Failed,
    Fence,
    Record,
    ReleaseBlocks,
    SendAbort,
    SendDelivered,
    SendNack,
    SendTicket,
    StopReceiving,
)
from kv_transfer.transport import MessageHeader, Transport
from tandem.errors import BY_CODE, HandoffFailed, TandemError, TransportError
from tandem.kv.cache import KvCache
from tandem.rpc.convert import finish_reason_from_proto
from tandem.rpc.tandem.v1 import worker_pb2
from tandem.types import BlockId, Epoch, HandoffId

logger = logging.getLogger(__name__)

TICK_S = 0.25
"""How often lease clocks are looked at."""


@dataclass(kw_only=True, slots=True)
class Arrived:
    """What came to a worker since it started, in messages and bytes. Approximate under contention, never decreasing."""

    num_bytes: int = 0
    num_messages: int = 0
    num_refused: int = 0
    num_nacked: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceiveCallbacks:
    """What the owner of the destination blocks wants to know. Any thread; called under the handoff's lock."""

    delivered: Callable[[Record], None]
    """Blocks and record are the sequence's. Called at most once."""
    failed: Callable[[TandemError], None]
    """The sequence cannot be decoded; its blocks may still be held by the handoff."""
    released: Callable[[], None]
    """The blocks that the handoff held are the pool's again. Called at most once, never after `delivered`."""


class IncomingHandoff:
    """One handoff on the decode side."""

    def __init__(
        self,
        handoff_id: HandoffId,
        *,
        machine: DestinationHandoff,
        receiver: HandoffReceiver,
        callbacks: ReceiveCallbacks,
    ) -> None:
        self.handoff_id = handoff_id
        self._machine = machine
        self._receiver = receiver
        self._callbacks = callbacks
        self._lock = threading.RLock()
        self._loop = asyncio.get_running_loop()
        self._block_ids: tuple[BlockId, ...] = ()
        self._failure: TandemError | None = None
        self._closed = False
        self.outbox: asyncio.Queue[worker_pb2.DestinationMessage | None] = asyncio.Queue()

    # --- owner of the blocks

    def reserved(self, block_ids: tuple[BlockId, ...]) -> None:
        """All blocks the sequence can need are reserved. Gives them back at once if the handoff is over already."""
        with self._lock:
            if self._machine.ended:
                self._callbacks.released()
                return
            self._block_ids = block_ids
            self._perform(self._machine.reserved())

    def abort(self, error: TandemError) -> None:
        """Our side gives up."""
        with self._lock:
            self._failure = self._failure or error
            self._perform(self._machine.abort(error.message))

    # --- transport's thread

    def place(self, header: MessageHeader, cache: KvCache) -> list[torch.Tensor] | None:
        """Where a message goes, or None when it must not be written."""
        with self._lock:
            blocks = _range_of(header)
            expected = header.num_blocks * cache.layout.block_layer_bytes
            if header.num_bytes != expected or not self._machine.may_place(blocks, header.epoch):
                return None
            first = header.first_block
            return cache.segments(header.layer, self._block_ids[first : first + header.num_blocks])

    def landed(self, header: MessageHeader, error: TransportError | None) -> None:
        """A placed message is whole, or will never be."""
        with self._lock:
            text = None if error is None else error.message
            self._perform(self._machine.landed(_range_of(header), digest=header.digest, error=text))

    # --- event loop

    def on_message(self, message: worker_pb2.SourceMessage) -> None:
        """A control message from the prefill worker, after its offer."""
        kind = message.WhichOneof("message")
        with self._lock:
            if kind == "renew":
                self._perform(self._machine.renewed(time.monotonic()))
                self._put(worker_pb2.DestinationMessage(renewed=worker_pb2.LeaseRenewal(epoch=self._machine.epoch)))
            elif kind == "record":
                self._perform(self._machine.record(_record_from_proto(message.record)))
            elif kind == "abort":
                reason = message.abort.reason or "the prefill worker gave up"
                self._failure = self._failure or BY_CODE.get(message.abort.code, HandoffFailed)(reason)
                self._perform(self._machine.peer_aborted(reason))
            elif kind == "drained":
                self._perform(self._machine.peer_drained())
            else:
                self.abort(HandoffFailed(f"a second {kind or 'empty message'} in one handoff"))

    def peer_lost(self, reason: str) -> None:
        """The control stream is gone."""
        with self._lock:
            self._perform(self._machine.peer_lost(reason))

    def tick(self, now: float) -> None:
        """Looks at the lease clock."""
        with self._lock:
            self._perform(self._machine.tick(now))

    # --- actions

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            self._perform_one(action)
        if self._machine.ended and not self._closed:
            self._closed = True
            self._put(None)
            self._receiver.forget(self.handoff_id)

    def _perform_one(self, action: Action) -> None:
        epoch = self._machine.epoch
        match action:
            case SendTicket(lease_s=lease_s, first_block=first_block):
                self._put(worker_pb2.DestinationMessage(ticket=self._receiver.ticket(self, lease_s, first_block)))
            case SendNack(blocks=blocks, reason=reason):
                self._receiver.arrived.num_nacked += 1
                nack = worker_pb2.HandoffNack(
                    epoch=epoch,
                    layer=blocks.layer,
                    first_block=blocks.first_block,
                    num_blocks=blocks.num_blocks,
                    reason=reason,
                )
                self._put(worker_pb2.DestinationMessage(nack=nack))
            case SendDelivered():
                self._put(worker_pb2.DestinationMessage(delivered=worker_pb2.HandoffDelivered(epoch=epoch)))
            case SendAbort(reason=reason):
                code = self._failure.code if self._failure else HandoffFailed.code
                abort = worker_pb2.HandoffAbort(epoch=epoch, reason=reason, code=code)
                self._put(worker_pb2.DestinationMessage(abort=abort))
            case Deliver(record=record):
                self._callbacks.delivered(record)
            case Failed(reason=reason):
                self._callbacks.failed(self._failure or HandoffFailed(reason))
            case StopReceiving():
                self._receiver.quiesce(self, self._receives_stopped)
            case Fence():
                self._receiver.quiesce(self, self._fenced)
            case ReleaseBlocks():
                self._callbacks.released()
            case _:
                raise AssertionError(f"not a destination action: {action}")

    def _receives_stopped(self) -> None:
        with self._lock:
            self._perform(self._machine.receives_stopped())

    def _fenced(self) -> None:
        with self._lock:
            self._perform(self._machine.fenced())

    @property
    def epoch(self) -> Epoch:
        """This worker's incarnation, named by every message."""
        return self._machine.epoch

    def _put(self, message: worker_pb2.DestinationMessage | None) -> None:
        self._loop.call_soon_threadsafe(self.outbox.put_nowait, message)


class HandoffReceiver:
    """All open handoffs of a decode worker; the transport's sink."""

    def __init__(self, *, cache: KvCache, transport: Transport) -> None:
        self._cache = cache
        self._transport = transport
        self._handoffs: dict[HandoffId, IncomingHandoff] = {}
        self.arrived = Arrived()
        transport.serve(self)

    def __len__(self) -> int:
        return len(self._handoffs)

    def place(self, header: MessageHeader) -> Sequence[torch.Tensor] | None:
        """Sink: unknown and stale messages are refused."""
        handoff = self._handoffs.get(header.handoff_id)
        placed = None if handoff is None else handoff.place(header, self._cache)
        if placed is None:
            self.arrived.num_refused += 1
            logger.info("refused a message of handoff %s, layer %d", header.handoff_id, header.layer)
        return placed

    def landed(self, header: MessageHeader, error: TransportError | None) -> None:
        """Sink."""
        handoff = self._handoffs.get(header.handoff_id)
        assert handoff is not None, "a handoff is forgotten only when nothing of it is under way"
        if error is None:
            self.arrived.num_bytes += header.num_bytes
            self.arrived.num_messages += 1
        handoff.landed(header, error)

    def open(self, handoff: IncomingHandoff) -> None:
        """Makes a handoff known to the transport's thread. Raises HandoffFailed when its id is in use."""
        if self._handoffs.setdefault(handoff.handoff_id, handoff) is not handoff:
            raise HandoffFailed(f"handoff {handoff.handoff_id} is open already")

    def forget(self, handoff_id: HandoffId) -> None:
        """Called by a handoff that has ended."""
        self._handoffs.pop(handoff_id, None)

    def ticket(self, handoff: IncomingHandoff, lease_s: float, first_block: int) -> worker_pb2.Ticket:
        """The ticket of a handoff whose blocks are reserved."""
        return worker_pb2.Ticket(
            handoff_id=handoff.handoff_id,
            epoch=handoff.epoch,
            lease_s=lease_s,
            first_block=first_block,
            transport=self._transport.name,
            transport_address=self._transport.address(),
        )

    def quiesce(self, handoff: IncomingHandoff, then: Callable[[], None]) -> None:
        """Calls `then` when the transport writes nothing of this handoff any more.

        In both transports only this process writes its KV memory, so this is a fence against the peer as well.
        """
        future = self._transport.quiesce(handoff.handoff_id)
        future.add_done_callback(lambda _: then())

    async def converse(
        self, handoff: IncomingHandoff, messages: AsyncIterator[worker_pb2.SourceMessage]
    ) -> AsyncIterator[worker_pb2.DestinationMessage]:
        """The control stream after the offer: yields what to send until the handoff has ended."""
        reader = asyncio.create_task(self._read(handoff, messages))
        ticker = asyncio.create_task(self._tick(handoff))
        try:
            while (message := await handoff.outbox.get()) is not None:
                yield message
        finally:
            reader.cancel()
            ticker.cancel()
            handoff.peer_lost("the control stream was closed")
            await asyncio.gather(reader, ticker, return_exceptions=True)

    async def _read(self, handoff: IncomingHandoff, messages: AsyncIterator[worker_pb2.SourceMessage]) -> None:
        async for message in messages:
            try:
                handoff.on_message(message)
            except TandemError as error:
                handoff.abort(error)
        handoff.peer_lost("the prefill worker closed the handoff")

    async def _tick(self, handoff: IncomingHandoff) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            handoff.tick(time.monotonic())


def _range_of(header: MessageHeader) -> BlockRange:
    return BlockRange(layer=header.layer, first_block=header.first_block, num_blocks=header.num_blocks)


def _record_from_proto(record: worker_pb2.HandoffRecord) -> Record:
    return Record(
        first_token_id=record.first_token_id,
        finish_reason=finish_reason_from_proto(record.finish_reason),
        num_cached_tokens=record.num_cached_tokens,
        num_messages=record.num_messages,
        digest=record.digest,
    )
