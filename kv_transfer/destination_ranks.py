"""Rank 0 of a decode worker and its other ranks: opens their halves of a handoff, passes on what the source says to
them, and hears what becomes of them. Carries messages; what they mean is the machines'.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from kv_transfer.ticket import Claims, expiry_ms
from tandem.errors import LinkClosed
from tandem.ranks.channel import Kind
from tandem.ranks.hub import RankHub
from tandem.rpc.tandem.v1 import rank_pb2, worker_pb2
from tandem.types import BlockId, HandoffId

logger = logging.getLogger(__name__)


class RankedIncoming(Protocol):
    """Rank 0's half, which speaks for all. Any thread."""

    claims: Claims

    @property
    def num_blocks(self) -> int:
        """Of the prompt."""

    def rank_said(self, message: worker_pb2.DestinationMessage) -> None:
        """What another rank's half would say to the source."""

    def rank_ended(self, rank: int, ended: rank_pb2.RankEnded) -> None:
        """Nothing is written into another rank any more."""


class DestinationRanks:
    """All ranks but 0, over the worker's hub, once they are ready."""

    def __init__(self, hub: RankHub) -> None:
        self.hub = hub
        self.ranks = range(1, hub.num_ranks)
        self.addresses = tuple(hub.addresses)
        """Where their transports are reached, in order."""
        self._open: dict[HandoffId, DestinationParts] = {}
        hub.listen_to_handoffs(self._on_frame)

    def open(self, owner: RankedIncoming) -> DestinationParts:
        """The other ranks' halves of a handoff, which do not exist before `DestinationParts.start`."""
        parts = DestinationParts(self, owner)
        self._open[parts.handoff_id] = parts
        return parts

    def forget(self, handoff_id: HandoffId) -> None:
        """Rank 0's half has ended, and with it all."""
        self._open.pop(handoff_id, None)

    def _on_frame(self, rank: int, payload: bytes) -> None:
        message = rank_pb2.FromRank.FromString(payload)
        parts = self._open.get(HandoffId(message.handoff_id))
        if parts is not None:
            parts.on_message(rank, message)

    def close(self) -> None:
        """Ends the other ranks."""
        self.hub.close()


class DestinationParts:
    """Of one handoff. Any thread."""

    def __init__(self, ranks: DestinationRanks, owner: RankedIncoming) -> None:
        self.handoff_id = owner.claims.handoff_id
        self._ranks = ranks
        self._owner = owner
        self._started = False
        self._lock = threading.Lock()
        self._not_ready = set(ranks.ranks)
        self._then: Callable[[], None] = lambda: None

    @property
    def ranks(self) -> range:
        """Who they are."""
        return self._ranks.ranks

    def start(
        self, block_ids: Sequence[BlockId], ticket: worker_pb2.Ticket, *, then: Callable[[], None]
    ) -> None:
        """Opens the halves; calls `then` when all know where to write, for only then may messages come."""
        self._then = then
        self._started = True
        claims = self._owner.claims
        offer = worker_pb2.HandoffOffer(
            handoff_id=claims.handoff_id,
            request_id=claims.request_id,
            prefill_worker_id=claims.source,
            prefill_epoch=claims.source_epoch,
            decode_worker_id=claims.destination,
            decode_epoch=claims.destination_epoch,
            expires_ms=expiry_ms(claims.expires_s),
            tensor_parallel=claims.source_tp,
            pipeline_parallel=claims.source_pp,
        )
        opened = rank_pb2.OpenDestination(
            offer=offer,
            lease_s=ticket.lease_s,
            num_blocks=self._owner.num_blocks,
            first_block=ticket.first_block,
            block_ids=block_ids,
        )
        self._tell(rank_pb2.ToRank(open_destination=opened))

    def pass_on(self, message: worker_pb2.SourceMessage) -> None:
        """What the prefill worker said, to all ranks."""
        self._tell(rank_pb2.ToRank(from_source=message))

    def peer_lost(self, reason: str) -> None:
        """Nothing more is to be written: the source is gone, or rank 0 gives up for all. Each rank fences itself."""
        self._tell(rank_pb2.ToRank(peer_lost=reason))

    def _tell(self, message: rank_pb2.ToRank) -> None:
        if not self._started:
            return
        message.handoff_id = self.handoff_id
        try:
            self._ranks.hub.broadcast(Kind.HANDOFF, message.SerializeToString())
        except LinkClosed as exc:
            logger.warning("a rank is gone, and this worker with it: %s", exc)

    def on_message(self, rank: int, message: rank_pb2.FromRank) -> None:
        """A rank said something; on the thread of its connection."""
        match message.WhichOneof("message"):
            case "ready":
                with self._lock:
                    self._not_ready.discard(rank)
                    is_last = not self._not_ready
                if is_last:
                    self._then()
            case "from_destination":
                self._owner.rank_said(message.from_destination)
            case "ended":
                self._owner.rank_ended(rank, message.ended)
