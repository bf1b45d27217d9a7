"""Drives source handoffs: the control stream on the event loop, the posting of KV from the engine's thread.

Owns links, timestamps and the order of IO; every decision is `source.SourceHandoff`'s. One lock per handoff guards its
machine; callbacks run under it, so a callback's owner must not call a handoff while it holds a lock that its own
callbacks take.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from grpc import aio

from kv_transfer.digest import digest
from kv_transfer.handoff import (
    Action,
    BlockRange,
    Failed,
    Fence,
    Record,
    ReleaseBlocks,
    Resend,
    SendAbort,
    SendDrained,
    SendRecord,
    combined_digest,
)
from kv_transfer.links import LinkTable
from kv_transfer.source import SourceHandoff
from kv_transfer.transport import Link, MessageHeader
from tandem.errors import BY_CODE, HandoffFailed, LinkClosed, TandemError, TransportError
from tandem.kv.cache import KvCache
from tandem.rpc.convert import finish_reason_to_proto
from tandem.rpc.status import from_rpc_error
from tandem.rpc.tandem.v1 import worker_pb2, worker_pb2_grpc
from tandem.types import BlockId, Epoch, FinishReason, HandoffId, RequestId, WorkerId

if TYPE_CHECKING:
    _Call = aio.StreamStreamCall[worker_pb2.SourceMessage, worker_pb2.DestinationMessage]

MAX_LEASE_S = 600.0
"""Longest lease that is believed; `tandem.config` allows no longer one."""
STREAM_END_TIMEOUT_S = 2.0
"""How long an ended handoff waits for the peer to close the control stream."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SentMessage:
    """One message of a transfer; times on this process's monotonic clock."""

    blocks: BlockRange
    num_bytes: int
    posted_s: float
    done_s: float


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
    """One handoff from the prefill side."""

    def __init__(
        self,
        offer: worker_pb2.HandoffOffer,
        *,
        peer: WorkerId,
        cache: KvCache,
        links: LinkTable,
        machine: SourceHandoff,
        callbacks: HandoffCallbacks,
    ) -> None:
        self._offer = offer
        self._peer = peer
        self._cache = cache
        self._links = links
        self._machine = machine
        self._callbacks = callbacks
        self._lock = threading.RLock()
        self._loop = asyncio.get_running_loop()
        self._outbox: asyncio.Queue[worker_pb2.SourceMessage | None] = asyncio.Queue()
        self._link: Link | None = None
        self._block_ids: tuple[BlockId, ...] = ()
        self._digests: dict[tuple[int, int], int] = {}
        self._failure: TandemError | None = None
        self._over = asyncio.Event()
        self._closed = False
        self.messages: list[SentMessage] = []
        self.asked_s = time.monotonic()
        self.ticket_s = 0.0

    @property
    def request_id(self) -> RequestId:
        """The request that is handed over."""
        return RequestId(self._offer.request_id)

    # --- engine thread

    def post(self, blocks: BlockRange, block_ids: tuple[BlockId, ...]) -> None:
        """Ships the KV of a range that has just been written; `block_ids` is the whole block table."""
        self._block_ids = block_ids
        first = max(blocks.first_block, self._machine.first_block)
        count = blocks.first_block + blocks.num_blocks - first
        if count > 0:
            self._post(BlockRange(layer=blocks.layer, first_block=first, num_blocks=count))

    def _post(self, blocks: BlockRange) -> None:
        with self._lock:
            if not self._machine.posting(blocks):
                return
            link = self._link
        assert link is not None
        segments = self._cache.segments(
            blocks.layer, self._block_ids[blocks.first_block : blocks.first_block + blocks.num_blocks]
        )
        checksum = digest(segments)
        self._digests[blocks.layer, blocks.first_block] = checksum
        header = MessageHeader(
            handoff_id=HandoffId(self._offer.handoff_id),
            epoch=self._machine.epoch,
            layer=blocks.layer,
            first_block=blocks.first_block,
            num_blocks=blocks.num_blocks,
            num_bytes=sum(segment.numel() for segment in segments),
            digest=checksum,
        )
        posted_s = time.monotonic()
        future = link.send(header, segments)
        future.add_done_callback(lambda done: self._sent(done, header.num_bytes, posted_s, blocks))

    def _sent(self, future: Future[None], num_bytes: int, posted_s: float, blocks: BlockRange) -> None:
        error = future.exception()
        done_s = time.monotonic()
        with self._lock:
            if error is None:
                self.messages.append(
                    SentMessage(blocks=blocks, num_bytes=num_bytes, posted_s=posted_s, done_s=done_s)
                )
            self._perform(self._machine.sent(blocks, None if error is None else str(error)))
        if isinstance(error, LinkClosed) and self._link is not None:
            self._loop.call_soon_threadsafe(self._links.drop, self._link)

    def computed(self, *, first_token_id: int, finish_reason: FinishReason | None, num_cached_tokens: int) -> None:
        """The prompt is prefilled, everything has been posted: send the record."""
        ordered = [value for _, value in sorted(self._digests.items())]
        record = Record(
            first_token_id=first_token_id,
            finish_reason=finish_reason,
            num_cached_tokens=num_cached_tokens,
            num_messages=len(ordered),
            digest=combined_digest(ordered),
        )
        with self._lock:
            self._perform(self._machine.computed(record))

    # --- any thread

    def abort(self, error: TandemError) -> None:
        """Ends the handoff; `ended` follows when no send is under way."""
        with self._lock:
            self._failure = self._failure or error
            self._perform(self._machine.abort(error.message))

    # --- event loop

    async def run(self, stub: worker_pb2_grpc.DecodeWorkerAsyncStub) -> None:
        """Holds the control stream until the handoff has ended. Raises nothing: failures go to the callbacks."""
        call = stub.Handoff()
        self._put(worker_pb2.SourceMessage(offer=self._offer))
        writer = asyncio.create_task(self._write(call))
        reader = asyncio.create_task(self._read(call))
        try:
            await self._pulse()
            await asyncio.wait({reader}, timeout=STREAM_END_TIMEOUT_S)
        finally:
            writer.cancel()
            reader.cancel()
            call.cancel()
            await asyncio.gather(writer, reader, return_exceptions=True)

    async def _read(self, call: _Call) -> None:
        reason = "the decode worker closed the handoff"
        try:
            async for message in call:
                await self._on_message(message)
        except aio.AioRpcError as exc:
            error = from_rpc_error(exc)
            reason = f"lost the decode worker: {error.message}"
            self._failure = error if isinstance(error, HandoffFailed) else HandoffFailed(reason)
        with self._lock:
            self._perform(self._machine.peer_lost(reason, time.monotonic()))

    async def _on_message(self, message: worker_pb2.DestinationMessage) -> None:
        now = time.monotonic()
        kind = message.WhichOneof("message")
        if kind == "ticket":
            await self._on_ticket(message.ticket)
            return
        with self._lock:
            if kind == "renewed":
                self._perform(self._machine.renewed(now))
            elif kind == "nack":
                nack = message.nack
                blocks = BlockRange(layer=nack.layer, first_block=nack.first_block, num_blocks=nack.num_blocks)
                self._perform(self._machine.nack(blocks, nack.reason, now))
            elif kind == "delivered":
                self._perform(self._machine.delivered(now))
            elif kind == "abort":
                error_type = BY_CODE.get(message.abort.code, HandoffFailed)
                self._failure = error_type(message.abort.reason)
                self._perform(self._machine.peer_aborted(message.abort.reason))

    async def _on_ticket(self, ticket: worker_pb2.Ticket) -> None:
        epoch = Epoch(ticket.epoch)
        if not 0 < ticket.lease_s <= MAX_LEASE_S:
            self.abort(HandoffFailed(f"a ticket with a lease of {ticket.lease_s} s"))
            return
        try:
            self._link = await self._links.get(self._peer, ticket.transport_address)
        except TransportError as exc:
            self.abort(type(exc)(f"no link to the decode worker: {exc.message}"))
            return
        with self._lock:
            was_offered = not self._machine.may_send and not self._machine.ended
            self.ticket_s = time.monotonic()
            actions = self._machine.ticket(
                epoch=epoch, lease_s=ticket.lease_s, first_block=ticket.first_block, now=self.ticket_s
            )
            self._perform(actions)
            if was_offered and self._machine.may_send:
                self._callbacks.ticket()

    async def _write(self, call: _Call) -> None:
        try:
            while (message := await self._outbox.get()) is not None:
                await call.write(message)
            await call.done_writing()
        except (aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reader sees the same broken stream and reports it

    async def _pulse(self) -> None:
        """Renews the lease and lets the machine see time pass until the handoff has ended."""
        renewed_s = time.monotonic()
        while not self._over.is_set():
            beat_s = self._machine.lease_s / 4
            try:
                async with asyncio.timeout(min(beat_s, 0.25)):
                    await self._over.wait()
            except TimeoutError:
                pass
            now = time.monotonic()
            with self._lock:
                if now - renewed_s >= beat_s and not self._machine.ended:
                    renewed_s = now
                    renewal = worker_pb2.LeaseRenewal(epoch=self._machine.epoch)
                    self._put(worker_pb2.SourceMessage(renew=renewal))
                self._perform(self._machine.tick(now))

    # --- actions

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            self._perform_one(action)
        if self._machine.ended and not self._closed:
            self._closed = True
            self._put(None)
            self._loop.call_soon_threadsafe(self._over.set)

    def _perform_one(self, action: Action) -> None:
        epoch = self._machine.epoch
        match action:
            case SendRecord(record=record):
                self._put(worker_pb2.SourceMessage(record=_record_to_proto(record, epoch)))
            case SendAbort(reason=reason):
                code = self._failure.code if self._failure else HandoffFailed.code
                abort = worker_pb2.HandoffAbort(epoch=epoch, reason=reason, code=code)
                self._put(worker_pb2.SourceMessage(abort=abort))
            case SendDrained():
                self._put(worker_pb2.SourceMessage(drained=worker_pb2.HandoffDrained(epoch=epoch)))
            case Resend(blocks=blocks):
                self._loop.run_in_executor(None, self._post, blocks)
            case Fence():
                self._loop.call_soon_threadsafe(self._fence)
            case Failed(reason=reason):
                self._callbacks.failed(self._failure or HandoffFailed(reason))
            case ReleaseBlocks():
                self._callbacks.ended()
            case _:
                raise AssertionError(f"not a source action: {action}")

    def _fence(self) -> None:
        if self._link is not None:
            self._links.drop(self._link)
        with self._lock:
            self._perform(self._machine.fenced())

    def _put(self, message: worker_pb2.SourceMessage | None) -> None:
        self._loop.call_soon_threadsafe(self._outbox.put_nowait, message)


def _record_to_proto(record: Record, epoch: Epoch) -> worker_pb2.HandoffRecord:
    return worker_pb2.HandoffRecord(
        epoch=epoch,
        first_token_id=record.first_token_id,
        finish_reason=finish_reason_to_proto(record.finish_reason),
        num_cached_tokens=record.num_cached_tokens,
        num_messages=record.num_messages,
        digest=record.digest,
    )
