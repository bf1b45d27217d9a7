"""Drives one source handoff: posts KV from the engine's thread, and carries out what its machine asks for.

Owns the link, timestamps and the order of IO; every decision is `source.SourceHandoff`'s. One lock per handoff guards
its machine; callbacks run under it, so a callback's owner must not call a handoff while it holds a lock that its own
callbacks take.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from kv_transfer.digest import DigestPolicy
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
from kv_transfer.offer import Offer
from kv_transfer.sizing import LinkSpeed
from kv_transfer.source import SourceHandoff
from kv_transfer.source_control import SourceControl
from kv_transfer.transport import Link, MessageHeader
from tandem.errors import BY_CODE, HandoffFailed, LinkClosed, TandemError, TransportError
from tandem.kv.cache import KvCache
from tandem.rpc.convert import first_token_to_proto
from tandem.rpc.tandem.v1 import worker_pb2, worker_pb2_grpc
from tandem.types import BlockId, Epoch, RequestId, TokenStep


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
        offer: Offer,
        *,
        cache: KvCache,
        links: LinkTable,
        machine: SourceHandoff,
        callbacks: HandoffCallbacks,
        digests: DigestPolicy,
    ) -> None:
        self._offer = offer
        self._cache = cache
        self._links = links
        self._machine = machine
        self._callbacks = callbacks
        self._digest_policy = digests
        self._lock = threading.RLock()
        self._loop = asyncio.get_running_loop()
        self._control = SourceControl(self)
        self._link: Link | None = None
        self._link_key = b""
        self._block_ids: tuple[BlockId, ...] = ()
        self._digests: dict[tuple[int, int], int] = {}
        self._failure: TandemError | None = None
        self._closed = False
        self.transport = ""
        """The transport in use, once there is a link."""
        self.speed: LinkSpeed | None = None
        """What the link's probe measured, once there is a link."""
        self.messages: list[SentMessage] = []
        self.asked_s = time.monotonic()
        self.ticket_s = 0.0

    @property
    def request_id(self) -> RequestId:
        """The request that is handed over."""
        return self._offer.claims.request_id

    # --- engine thread

    def post(self, blocks: BlockRange, block_ids: tuple[BlockId, ...]) -> None:
        """Ships the KV of a range that has just been written, less what the destination holds already, in one message.

        `block_ids` is the whole block table.
        """
        self._block_ids = block_ids
        first = max(blocks.first_block, self._machine.first_block)
        count = blocks.first_block + blocks.num_blocks - first
        if count > 0:
            self._post(
                BlockRange(layer=blocks.layer, num_layers=blocks.num_layers, first_block=first, num_blocks=count)
            )

    def _post(self, blocks: BlockRange) -> None:
        with self._lock:
            if not self._machine.posting(blocks):
                return
            link = self._link
        assert link is not None
        block_ids = self._block_ids[blocks.first_block : blocks.first_block + blocks.num_blocks]
        segments = [s for layer in blocks.layers for s in self._cache.segments(layer, block_ids)]
        checksum = self._digest_policy.digest(segments)
        self._digests[blocks.layer, blocks.first_block] = checksum
        header = MessageHeader(
            handoff_id=self._offer.claims.handoff_id,
            epoch=self._machine.epoch,
            layer=blocks.layer,
            num_layers=blocks.num_layers,
            first_block=blocks.first_block,
            num_blocks=blocks.num_blocks,
            num_bytes=sum(segment.numel() for segment in segments),
            digest=checksum,
        ).sealed(self._link_key)
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

    def computed(self, first: tuple[TokenStep, ...], *, num_cached_tokens: int) -> None:
        """The prompt is prefilled, everything has been posted: send the record. `first`: each choice's first token."""
        ordered = [value for _, value in sorted(self._digests.items())]
        record = Record(
            first=first,
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
        self._control.put(worker_pb2.SourceMessage(offer=self._offer.message))
        await self._control.run(stub)

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
        try:
            self._link_key = self._offer.accept(ticket, now=time.time())
            link, self.speed = await self._links.get(self._offer.claims.destination, ticket.transport_address)
        except TransportError as exc:
            self.abort(type(exc)(f"no link to the decode worker: {exc.message}"))
            return
        except HandoffFailed as exc:
            self.abort(exc)
            return
        with self._lock:
            self._link, self.transport = link, link.transport
            was_offered = not self._machine.may_send and not self._machine.ended
            self.ticket_s = time.monotonic()
            actions = self._machine.ticket(
                epoch=Epoch(ticket.epoch), lease_s=ticket.lease_s, first_block=ticket.first_block, now=self.ticket_s
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


def _range_of(nack: worker_pb2.HandoffNack) -> BlockRange:
    return BlockRange(
        layer=nack.layer, num_layers=nack.num_layers, first_block=nack.first_block, num_blocks=nack.num_blocks
    )


def _record_to_proto(record: Record, epoch: Epoch) -> worker_pb2.HandoffRecord:
    return worker_pb2.HandoffRecord(
        epoch=epoch,
        first_tokens=[first_token_to_proto(step) for step in record.first],
        num_cached_tokens=record.num_cached_tokens,
        num_messages=record.num_messages,
        digest=record.digest,
    )
