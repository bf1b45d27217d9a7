"""Drives one source handoff: posts KV from the engine's thread, and carries out what its machine asks for.

Owns timestamps and the order of IO; every decision is `source.SourceHandoff`'s. One lock per handoff guards
its machine; callbacks run under it, so a callback's owner must not call a handoff while it holds a lock that its own
callbacks take.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Protocol

from kv_transfer.handoff import (
    Action,
    BlockRange,
    Failed,
    Fence,
    LaneDigest,
    Record,
    ReleaseBlocks,
    Resend,
    SendAbort,
    SendDrained,
    SendRecord,
    combined_digest,
)
from kv_transfer.offer import Offer, reach_of
from kv_transfer.posting import Poster
from kv_transfer.sent import SentMessage
from kv_transfer.sizing import LinkSpeed
from kv_transfer.source import SourceHandoff
from kv_transfer.source_control import SourceControl
from kv_transfer.source_side import SourceSide
from tandem.errors import BY_CODE, ConfigError, HandoffFailed, LinkClosed, TandemError, TransportError
from tandem.rpc.convert import first_token_to_proto
from tandem.rpc.tandem.v1 import worker_pb2, worker_pb2_grpc
from tandem.types import BlockId, Epoch, RequestId, TokenStep


class SourceStream(Protocol):
    """What a half says goes here. Any thread."""

    def put(self, message: worker_pb2.SourceMessage) -> None:
        """Sends a message, after those before it."""

    def finish(self) -> None:
        """This half has ended: nothing more follows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HandoffCallbacks:
    """What the owner of the source blocks wants to know. Any thread; called under the handoff's lock."""

    ticket: Callable[[], None]
    """Compute may start."""
    failed: Callable[[TandemError], None]
    """The request cannot go on; blocks are still held."""
    ended: Callable[[], None]
    """The source blocks are the owner's again. Called once."""


class OutgoingHandoff:
    """One rank's half of one handoff from the prefill side.

    On rank 0, `side.ranks` are the other ranks, which have a half each; the control stream then speaks for all. On
    those, the stream given by `control` runs to rank 0.
    """

    def __init__(
        self,
        offer: Offer,
        *,
        side: SourceSide,
        machine: SourceHandoff,
        callbacks: HandoffCallbacks,
        control: SourceStream | None = None,
    ) -> None:
        self._offer = offer
        self._side = side
        self._machine = machine
        self._callbacks = callbacks
        self._lock = threading.RLock()
        self._loop = asyncio.get_running_loop()
        own = SourceControl(self)
        self._own_control = own
        self._control: SourceStream = own if control is None else control
        self._parts = None if side.ranks is None else side.ranks.open(offer.message, self)
        self._poster = Poster(offer.claims.handoff_id, side.cache, side.digests)
        self._block_ids: tuple[BlockId, ...] = ()
        self._computed: Record | None = None
        self._failure: TandemError | None = None
        self._closed = False
        self.transport = ""
        """The transport in use, once there is a link."""
        self.speed: LinkSpeed | None = None
        """What the slowest link's probe measured, once there is one."""
        self.messages: list[SentMessage] = []
        self.asked_s = time.monotonic()
        self.ticket_s = 0.0

    @property
    def request_id(self) -> RequestId:
        """The request that is handed over."""
        return self._offer.claims.request_id

    @property
    def first_block(self) -> int:
        """The destination holds those before it: they are never sent."""
        return self._machine.first_block

    @property
    def ended(self) -> bool:
        """Whether this half holds no block and nothing more will happen."""
        return self._machine.ended

    # --- engine thread

    def ship(self, blocks: BlockRange, block_ids: tuple[BlockId, ...], *, layers_per_message: int) -> None:
        """The batch that runs next completes these blocks in every layer: other ranks are told so."""
        if self._parts is not None:
            self._parts.ship(blocks, block_ids, layers_per_message=layers_per_message)

    def post(self, blocks: BlockRange, block_ids: tuple[BlockId, ...]) -> None:
        """Ships the KV of a range that has just been written, less what the destination holds already.

        One message for each destination rank that takes some of it; `block_ids` is the whole block table.
        """
        self._block_ids = block_ids
        first = max(blocks.first_block, self._machine.first_block)
        count = blocks.first_block + blocks.num_blocks - first
        if count > 0:
            for each in self._poster.ranges(replace(blocks, first_block=first, num_blocks=count)):
                self._post(each)

    def _post(self, blocks: BlockRange) -> None:
        with self._lock:
            if not self._machine.posting(blocks):
                return
        posted_s = time.monotonic()
        block_ids = self._block_ids[blocks.first_block : blocks.first_block + blocks.num_blocks]
        num_bytes, future = self._poster.send(blocks, block_ids)
        future.add_done_callback(lambda done: self._sent(done, num_bytes, posted_s, blocks))

    def _sent(self, future: Future[None], num_bytes: int, posted_s: float, blocks: BlockRange) -> None:
        error = future.exception()
        done_s = time.monotonic()
        with self._lock:
            if error is None:
                self.messages.append(
                    SentMessage(blocks=blocks, num_bytes=num_bytes, posted_s=posted_s, done_s=done_s)
                )
            self._perform(self._machine.sent(blocks, None if error is None else str(error)))
        if isinstance(error, LinkClosed):
            link = self._poster.lanes[blocks.destination].link
            self._loop.call_soon_threadsafe(self._side.links.drop, link)

    def computed(self, first: tuple[TokenStep, ...], *, num_cached_tokens: int) -> None:
        """The prompt is prefilled, everything has been posted: send the record. `first`: each choice's first token.

        With other ranks, as soon as they have said what they posted.
        """
        lanes = self._poster.lane_digests()
        own = next((lane for lane in lanes if (lane.source, lane.destination) == (0, 0)), None)
        record = Record(
            first=first,
            num_cached_tokens=num_cached_tokens,
            num_messages=self._poster.num_messages,
            digest=combined_digest(()) if own is None else own.digest,
            other_lanes=tuple(lane for lane in lanes if lane is not own),
        )
        if self._parts is not None:
            self._computed = record
            self._parts.ask_records()
            return
        with self._lock:
            self._perform(self._machine.computed(record))

    # --- other ranks (any thread)

    def rank_recorded(self, lanes: Sequence[LaneDigest], num_messages: int) -> None:
        """See `RankedHandoff`."""
        assert self._computed is not None
        record = replace(
            self._computed,
            other_lanes=(*self._computed.other_lanes, *lanes),
            num_messages=self._computed.num_messages + num_messages,
        )
        with self._lock:
            self._perform(self._machine.computed(record))

    def rank_failed(self, error: TandemError) -> None:
        """See `RankedHandoff`."""
        self.abort(error)

    def rank_ended(self, rank: int, messages: Sequence[SentMessage]) -> None:
        """See `RankedHandoff`."""
        with self._lock:
            self.messages += messages
            self._perform(self._machine.rank_ended(rank))

    # --- any thread

    def abort(self, error: TandemError) -> None:
        """Ends the handoff; `ended` follows when no send is under way."""
        with self._lock:
            self._failure = self._failure or error
            self._perform(self._machine.abort(error.message))

    # --- event loop

    async def run(self, stub: worker_pb2_grpc.DecodeWorkerAsyncStub) -> None:
        """Holds the control stream until the handoff has ended. Raises nothing: failures go to the callbacks."""
        self._own_control.put(worker_pb2.SourceMessage(offer=self._offer.message))
        await self._own_control.run(stub)

    @property
    def beat_s(self) -> float:
        """Several renewals a lease."""
        return self._machine.lease_s / 4

    def on_end(self, error: TandemError | None) -> None:
        """The control stream is over."""
        reason = "the decode worker closed the handoff"
        with self._lock:
            if error is not None:
                reason = f"lost the decode worker: {error.message}"
                self._failure = error if isinstance(error, HandoffFailed) else HandoffFailed(reason)
            if self._parts is not None:
                self._parts.peer_lost(reason)
            self._perform(self._machine.peer_lost(reason, time.monotonic()))

    def on_tick(self, now: float, *, renew: bool) -> None:
        """Time has passed."""
        with self._lock:
            if renew and not self._machine.ended:
                renewal = worker_pb2.LeaseRenewal(epoch=self._machine.epoch)
                self._control.put(worker_pb2.SourceMessage(renew=renewal))
            self._perform(self._machine.tick(now))

    async def on_message(self, message: worker_pb2.DestinationMessage) -> None:
        """The decode worker said something."""
        if message.WhichOneof("message") == "ticket":
            await self._on_ticket(message.ticket)
            return
        if self._parts is not None:
            self._parts.pass_on(message)
        with self._lock:
            self._perform(self._answer(message, time.monotonic()))

    def _answer(self, message: worker_pb2.DestinationMessage, now: float) -> list[Action]:
        match message.WhichOneof("message"):
            case "renewed":
                return self._machine.renewed(now)
            case "nack":
                nack = message.nack
                return self._machine.nack(_range_of(nack), nack.reason, round_number=nack.round, now=now)
            case "delivered":
                return self._machine.delivered(now)
            case "abort":
                self._failure = BY_CODE.get(message.abort.code, HandoffFailed)(message.abort.reason)
                return self._machine.peer_aborted(message.abort.reason)
        return []

    async def _on_ticket(self, ticket: worker_pb2.Ticket) -> None:
        claims = self._offer.claims
        try:
            key = self._offer.accept(ticket, now=time.time())
            lanes, self.speed = await self._side.open_lanes(
                claims.destination, claims.destination_epoch, reach_of(ticket)
            )
        except TransportError as exc:
            self.abort(type(exc)(f"no link to the decode worker: {exc.message}"))
            return
        except (HandoffFailed, ConfigError) as exc:
            self.abort(exc)
            return
        self._poster.open(lanes, key=key, epoch=Epoch(ticket.epoch))
        self.transport = lanes[0].link.transport if lanes else ""
        other_ranks = range(0)
        if self._parts is not None:
            other_ranks = self._parts.ranks
            await self._parts.start(ticket, lease_s=ticket.lease_s, max_resends=self._machine.max_resends)
        with self._lock:
            was_offered = not self._machine.may_send and not self._machine.ended
            self.ticket_s = time.monotonic()
            actions = self._machine.ticket(
                epoch=Epoch(ticket.epoch),
                lease_s=ticket.lease_s,
                first_block=ticket.first_block,
                now=self.ticket_s,
                other_ranks=other_ranks,
            )
            self._perform(actions)
            if was_offered and self._machine.may_send:
                self._callbacks.ticket()

    # --- actions

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            self._perform_one(action)
        if self._machine.ended and not self._closed:
            self._closed = True
            if self._side.ranks is not None:
                self._side.ranks.forget(self._offer.claims.handoff_id)
            self._control.finish()

    def _perform_one(self, action: Action) -> None:
        epoch = self._machine.epoch
        match action:
            case SendRecord(record=record):
                self._control.put(worker_pb2.SourceMessage(record=_record_to_proto(record, epoch)))
            case SendAbort(reason=reason):
                code = self._failure.code if self._failure else HandoffFailed.code
                abort = worker_pb2.HandoffAbort(epoch=epoch, reason=reason, code=code)
                self._control.put(worker_pb2.SourceMessage(abort=abort))
            case SendDrained():
                self._control.put(worker_pb2.SourceMessage(drained=worker_pb2.HandoffDrained(epoch=epoch)))
            case Resend(blocks=blocks):
                self._loop.run_in_executor(None, self._post, blocks)
            case Fence():
                self._loop.call_soon_threadsafe(self._fence)
            case Failed(reason=reason):
                if self._parts is not None:
                    self._parts.abort(reason)
                self._callbacks.failed(self._failure or HandoffFailed(reason))
            case ReleaseBlocks():
                self._callbacks.ended()
            case _:
                raise AssertionError(f"not a source action: {action}")

    def _fence(self) -> None:
        for link in self._poster.links:
            self._side.links.drop(link)
        with self._lock:
            self._perform(self._machine.fenced())


def _range_of(nack: worker_pb2.HandoffNack) -> BlockRange:
    return BlockRange(
        layer=nack.layer,
        num_layers=nack.num_layers,
        first_block=nack.first_block,
        num_blocks=nack.num_blocks,
        source=nack.source_rank,
        destination=nack.destination_rank,
    )


def _record_to_proto(record: Record, epoch: Epoch) -> worker_pb2.HandoffRecord:
    return worker_pb2.HandoffRecord(
        epoch=epoch,
        first_tokens=[first_token_to_proto(step) for step in record.first],
        num_cached_tokens=record.num_cached_tokens,
        num_messages=record.num_messages,
        digest=record.digest,
        other_lanes=[
            worker_pb2.LaneDigest(source_rank=lane.source, destination_rank=lane.destination, digest=lane.digest)
            for lane in record.other_lanes
        ],
    )
