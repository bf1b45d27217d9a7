"""One handoff on the decode side: its messages, its control stream's words, and what its machine asks for.

Every decision is `destination.DestinationHandoff`'s. One lock guards the machine; callbacks run under it, so a
callback's owner must not call a handoff while it holds a lock that its own callbacks take.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from kv_transfer.destination import DestinationHandoff
from kv_transfer.handoff import (
    Action,
    BlockRange,
    Deliver,
    Failed,
    Fence,
    HandoffState,
    LaneDigest,
    Record,
    ReleaseBlocks,
    SendAbort,
    SendDelivered,
    SendNack,
    SendTicket,
    StopReceiving,
)
from kv_transfer.ticket import Claims
from kv_transfer.transport import MessageHeader
from tandem.errors import BY_CODE, HandoffFailed, TandemError, TransportError
from tandem.kv.cache import KvCache
from tandem.rpc.convert import first_token_from_proto
from tandem.rpc.tandem.v1 import rank_pb2, worker_pb2
from tandem.types import BlockId, Epoch

if TYPE_CHECKING:
    from kv_transfer.destination_ranks import DestinationParts

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class Arrived:
    """What came to a worker since it started, in messages and bytes. Approximate under contention, never decreasing."""

    num_bytes: int = 0
    num_messages: int = 0
    num_refused: int = 0
    num_forged: int = 0
    num_nacked: int = 0
    num_scattered: int = 0
    """Messages that went into more than one place."""


class HandoffDesk(Protocol):
    """What a handoff needs of the worker's receiver."""

    arrived: Arrived

    def link_key(self, claims: Claims) -> bytes:
        """The key of the handoff's messages."""

    def ticket(self, handoff: IncomingHandoff, lease_s: float, first_block: int) -> worker_pb2.Ticket:
        """The ticket of a handoff whose blocks are reserved."""

    def quiesce(self, handoff: IncomingHandoff, then: Callable[[], None]) -> None:
        """Calls `then` when nothing of this handoff is written any more."""

    def forget(self, handoff: IncomingHandoff) -> None:
        """The handoff has ended."""

    def parts(self, handoff: IncomingHandoff) -> DestinationParts | None:
        """The other ranks' halves, where this worker has other ranks and this is rank 0."""


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
    """One rank's half of one handoff on the decode side. Rank 0's speaks for all of them with the source."""

    def __init__(
        self,
        *,
        claims: Claims,
        machine: DestinationHandoff,
        desk: HandoffDesk,
        callbacks: ReceiveCallbacks,
        now: float,
    ) -> None:
        """`claims` are those of the ticket; `now` is wall clock, as their expiry."""
        self.claims = claims
        self.handoff_id = claims.handoff_id
        self._expires_s = time.monotonic() + claims.expires_s - now
        self._link_key = desk.link_key(claims)
        self._parts = desk.parts(self)
        self._machine = machine
        self._desk = desk
        self._callbacks = callbacks
        self._lock = threading.RLock()
        self._loop = asyncio.get_running_loop()
        self._block_ids: tuple[BlockId, ...] = ()
        self._failure: TandemError | None = None
        self._closed = False
        self.num_bytes = self.num_messages = 0
        """What has come into this rank, whole."""
        self.outbox: asyncio.Queue[worker_pb2.DestinationMessage | None] = asyncio.Queue()

    # --- owner of the blocks

    def reserved(self, block_ids: tuple[BlockId, ...], *, first_block: int = 0) -> None:
        """All blocks the sequence can need are reserved; those before `first_block` have their KV already.

        Gives them back at once if the handoff is over already.
        """
        with self._lock:
            if self._machine.ended:
                self._callbacks.released()
                return
            self._block_ids = block_ids
            other_ranks = range(0) if self._parts is None else self._parts.ranks
            self._perform(self._machine.reserved(first_block, other_ranks=other_ranks))

    def abort(self, error: TandemError) -> None:
        """Our side gives up."""
        with self._lock:
            self._failure = self._failure or error
            self._perform(self._machine.abort(error.message))

    # --- transport's thread

    def place(self, header: MessageHeader, cache: KvCache) -> list[torch.Tensor] | None:
        """Where a message goes, or None when it must not be written."""
        if not header.is_sealed(self._link_key):
            self._desk.arrived.num_forged += 1
            logger.warning("refused a message of handoff %s without its ticket's code", self.handoff_id)
            return None
        lane, blocks = self._machine.lanes.get(header.source_rank), _range_of(header)
        if lane is None or (header.first_head, header.num_heads) != (lane.heads.start, len(lane.heads)):
            return None
        head_bytes = cache.layout.block_layer_bytes // cache.layout.num_kv_heads
        expected = header.num_layers * header.num_blocks * header.num_heads * head_bytes
        with self._lock:
            is_late = time.monotonic() >= self._expires_s
            if is_late or header.num_bytes != expected or not self._machine.may_place(blocks, header.epoch):
                return None
            block_ids = self._block_ids[header.first_block : header.first_block + header.num_blocks]
        return [segment for layer in blocks.layers for segment in cache.segments(layer, block_ids, lane.heads)]

    def landed(self, header: MessageHeader, error: TransportError | None) -> None:
        """A placed message is whole, or will never be."""
        with self._lock:
            if error is None:
                self.num_bytes += header.num_bytes
                self.num_messages += 1
            text = None if error is None else error.message
            self._perform(self._machine.landed(_range_of(header), digest=header.digest, error=text))

    # --- event loop

    def on_message(self, message: worker_pb2.SourceMessage) -> None:
        """A control message from the prefill worker, after its offer."""
        kind = message.WhichOneof("message")
        if self._parts is not None:
            self._parts.pass_on(message)
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
        if self._parts is not None:
            self._parts.peer_lost(reason)
        with self._lock:
            self._perform(self._machine.peer_lost(reason))

    def tick(self, now: float) -> None:
        """Looks at the lease clock."""
        with self._lock:
            self._perform(self._machine.tick(now))

    # --- other ranks (any thread)

    @property
    def num_blocks(self) -> int:
        """Of the prompt."""
        return self._machine.num_blocks

    @property
    def is_whole(self) -> bool:
        """Whether everything has arrived."""
        return self._machine.state is HandoffState.DELIVERED

    def rank_said(self, message: worker_pb2.DestinationMessage) -> None:
        """What another rank's half would say to the source: rank 0 says it."""
        if message.WhichOneof("message") == "abort":
            self.abort(BY_CODE.get(message.abort.code, HandoffFailed)(message.abort.reason))
        elif message.WhichOneof("message") == "nack":
            self._desk.arrived.num_nacked += 1
            self._put(message)

    def rank_ended(self, rank: int, ended: rank_pb2.RankEnded) -> None:
        """Nothing is written into another rank any more."""
        self._desk.arrived.num_bytes += ended.num_bytes
        self._desk.arrived.num_messages += ended.num_messages
        with self._lock:
            self._perform(self._machine.rank_ended(rank, whole=ended.whole))

    # --- actions

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            self._perform_one(action)
        if self._machine.ended and not self._closed:
            self._closed = True
            self._put(None)
            self._desk.forget(self)

    def _perform_one(self, action: Action) -> None:
        epoch = self._machine.epoch
        match action:
            case SendTicket(lease_s=lease_s, first_block=first_block):
                ticket = worker_pb2.DestinationMessage(ticket=self._desk.ticket(self, lease_s, first_block))
                if self._parts is None:
                    self._put(ticket)
                else:
                    self._parts.start(self._block_ids, ticket.ticket, then=lambda: self._put(ticket))
            case SendNack(blocks=blocks, reason=reason, round=round_number):
                self._desk.arrived.num_nacked += 1
                nack = worker_pb2.HandoffNack(
                    epoch=epoch,
                    layer=blocks.layer,
                    num_layers=blocks.num_layers,
                    round=round_number,
                    first_block=blocks.first_block,
                    num_blocks=blocks.num_blocks,
                    source_rank=blocks.source,
                    destination_rank=blocks.destination,
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
                if self._parts is not None:
                    self._parts.peer_lost(reason)
                self._callbacks.failed(self._failure or HandoffFailed(reason))
            case StopReceiving():
                self._desk.quiesce(self, self._receives_stopped)
            case Fence():
                self._desk.quiesce(self, self._fenced)
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


def _range_of(header: MessageHeader) -> BlockRange:
    return BlockRange(
        layer=header.layer,
        num_layers=header.num_layers,
        first_block=header.first_block,
        num_blocks=header.num_blocks,
        source=header.source_rank,
        destination=header.destination_rank,
    )


def _record_from_proto(record: worker_pb2.HandoffRecord) -> Record:
    return Record(
        first=tuple(first_token_from_proto(token) for token in record.first_tokens),
        num_cached_tokens=record.num_cached_tokens,
        num_messages=record.num_messages,
        digest=record.digest,
        other_lanes=tuple(
            LaneDigest(source=lane.source_rank, destination=lane.destination_rank, digest=lane.digest)
            for lane in record.other_lanes
        ),
    )
