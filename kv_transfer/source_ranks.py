"""Rank 0 of a prefill worker and its other ranks: opens their halves of a handoff, passes on what the peer says to
them, and hears what becomes of them. Carries messages; what they mean is the machines'.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from typing import Protocol

from kv_transfer.handoff import BlockRange, LaneDigest
from kv_transfer.sent import SentMessage
from tandem.errors import BY_CODE, HandoffFailed, LinkClosed, TandemError
from tandem.ranks.channel import Kind
from tandem.ranks.hub import RankHub
from tandem.rpc.tandem.v1 import inference_pb2, rank_pb2, worker_pb2
from tandem.types import BlockId, HandoffId

logger = logging.getLogger(__name__)


class RankedHandoff(Protocol):
    """Rank 0's half, which speaks for all. Any thread."""

    def rank_recorded(self, lanes: Sequence[LaneDigest], num_messages: int) -> None:
        """A rank has posted everything; called by `SourceParts` once all have."""

    def rank_failed(self, error: TandemError) -> None:
        """A rank's half cannot go on."""

    def rank_ended(self, rank: int, messages: Sequence[SentMessage]) -> None:
        """Nothing of a rank's half is under way any more."""


class SourceRanks:
    """All ranks but 0, over the worker's hub."""

    def __init__(self, hub: RankHub) -> None:
        self.hub = hub
        self.ranks = range(1, hub.num_ranks)
        self._open: dict[HandoffId, SourceParts] = {}
        self._links: dict[int, Sequence[inference_pb2.LinkStatus]] = {}
        hub.listen_to_handoffs(self._on_frame)

    def open(self, offer: worker_pb2.HandoffOffer, owner: RankedHandoff) -> SourceParts:
        """The other ranks' halves of a handoff, which do not exist before `SourceParts.start`."""
        parts = SourceParts(self, HandoffId(offer.handoff_id), offer, owner)
        self._open[parts.handoff_id] = parts
        return parts

    def links(self) -> list[inference_pb2.LinkStatus]:
        """Theirs, as each said when a handoff ended last."""
        return [link for links in list(self._links.values()) for link in links]

    def forget(self, handoff_id: HandoffId) -> None:
        """Rank 0's half has ended, and with it all."""
        self._open.pop(handoff_id, None)

    def _on_frame(self, rank: int, payload: bytes) -> None:
        message = rank_pb2.FromRank.FromString(payload)
        if message.WhichOneof("message") == "ended":
            self._links[rank] = message.ended.links
        parts = self._open.get(HandoffId(message.handoff_id))
        if parts is not None:
            parts.on_message(rank, message)

    def close(self) -> None:
        """Ends the other ranks."""
        self.hub.close()


class SourceParts:
    """Of one handoff. All methods but `start` from any thread."""

    def __init__(
        self, ranks: SourceRanks, handoff_id: HandoffId, offer: worker_pb2.HandoffOffer, owner: RankedHandoff
    ) -> None:
        self.handoff_id = handoff_id
        self._ranks = ranks
        self._offer = offer
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._started = False
        self._not_ready = set(ranks.ranks)
        self._ready = asyncio.Event()
        self._lock = threading.Lock()
        self._lanes: list[LaneDigest] = []
        self._num_messages = 0
        self._not_recorded = set(ranks.ranks)

    @property
    def ranks(self) -> range:
        """Who they are."""
        return self._ranks.ranks

    async def start(self, ticket: worker_pb2.Ticket, *, lease_s: float, max_resends: int) -> None:
        """Returns when every rank has its links. What keeps one from it goes to the owner as a failure."""
        self._started = True
        opened = rank_pb2.OpenSource(offer=self._offer, lease_s=lease_s, max_resends=max_resends)
        self._tell(rank_pb2.ToRank(open_source=opened))
        self.pass_on(worker_pb2.DestinationMessage(ticket=ticket))
        await self._ready.wait()

    def pass_on(self, message: worker_pb2.DestinationMessage) -> None:
        """What the decode worker said, to all ranks; a NACK to the rank that it is for."""
        rank = message.nack.source_rank if message.WhichOneof("message") == "nack" else None
        self._tell(rank_pb2.ToRank(from_destination=message), rank=rank)

    def peer_lost(self, reason: str) -> None:
        """The control stream is gone."""
        self._tell(rank_pb2.ToRank(peer_lost=reason))

    def abort(self, reason: str) -> None:
        """Rank 0 gives up, for all."""
        self.pass_on(worker_pb2.DestinationMessage(abort=worker_pb2.HandoffAbort(reason=reason)))

    def ship(self, blocks: BlockRange, block_ids: Sequence[BlockId], *, layers_per_message: int) -> None:
        """The next batch completes these blocks in each layer."""
        ship = rank_pb2.Ship(
            first_block=blocks.first_block,
            num_blocks=blocks.num_blocks,
            layers_per_message=layers_per_message,
            block_ids=block_ids,
        )
        self._tell(rank_pb2.ToRank(ship=ship))

    def ask_records(self) -> None:
        """The prompt is computed: what did each send?"""
        self._tell(rank_pb2.ToRank(ask_record=rank_pb2.AskRecord()))

    def _tell(self, message: rank_pb2.ToRank, rank: int | None = None) -> None:
        if not self._started:
            return
        message.handoff_id = self.handoff_id
        payload = message.SerializeToString()
        try:
            if rank is None:
                self._ranks.hub.broadcast(Kind.HANDOFF, payload)
            else:
                self._ranks.hub.send(rank, Kind.HANDOFF, payload)
        except LinkClosed as exc:
            logger.warning("a rank is gone, and this worker with it: %s", exc)

    def on_message(self, rank: int, message: rank_pb2.FromRank) -> None:
        """A rank said something; on the thread of its connection."""
        match message.WhichOneof("message"):
            case "ready":
                with self._lock:
                    self._not_ready.discard(rank)
                if not self._not_ready:
                    self._loop.call_soon_threadsafe(self._ready.set)
            case "from_source":
                self._on_source(rank, message.from_source)
            case "ended":
                self._owner.rank_ended(rank, [_sent(rank, each) for each in message.ended.sent])

    def _on_source(self, rank: int, message: worker_pb2.SourceMessage) -> None:
        kind = message.WhichOneof("message")
        if kind == "abort":
            error = BY_CODE.get(message.abort.code, HandoffFailed)
            self._owner.rank_failed(error(f"rank {rank}: {message.abort.reason}"))
        elif kind == "record":
            with self._lock:
                self._lanes += [
                    LaneDigest(source=lane.source_rank, destination=lane.destination_rank, digest=lane.digest)
                    for lane in message.record.other_lanes
                ]
                self._num_messages += message.record.num_messages
                self._not_recorded.discard(rank)
                is_last = not self._not_recorded
            if is_last:
                self._owner.rank_recorded(self._lanes, self._num_messages)


def _sent(rank: int, message: rank_pb2.SentRange) -> SentMessage:
    return SentMessage(
        blocks=BlockRange(
            layer=message.layer,
            num_layers=message.num_layers,
            first_block=message.first_block,
            num_blocks=message.num_blocks,
            source=rank,
            destination=message.destination_rank,
        ),
        num_bytes=message.num_bytes,
        posted_s=message.posted_s,
        done_s=message.done_s,
    )
