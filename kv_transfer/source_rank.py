"""A prefill worker's rank other than 0: its halves of handoffs, each with a control stream that runs to rank 0.

It sends its own heads and layers straight to the ranks that take them; rank 0 speaks with the decode worker.
"""

from __future__ import annotations

import asyncio
import logging
import time

from kv_transfer.handoff import BlockRange
from kv_transfer.link_status import link_status
from kv_transfer.offer import Offer, claims_of
from kv_transfer.rank_loop import RankLoop
from kv_transfer.sender import HandoffCallbacks, OutgoingHandoff
from kv_transfer.sent import SentMessage
from kv_transfer.shipments import Shipments
from kv_transfer.source import SourceHandoff
from kv_transfer.source_side import SourceSide
from tandem.model.executor import LayerHook
from tandem.ranks.follower import Enqueue
from tandem.rpc.tandem.v1 import rank_pb2, worker_pb2
from tandem.secret import ClusterKey
from tandem.types import BlockId, HandoffId

logger = logging.getLogger(__name__)

TICK_S = 0.25

Inbox = asyncio.Queue[worker_pb2.DestinationMessage | None]


class _ToRank0:
    """A half's control stream: what concerns rank 0 is passed on."""

    def __init__(self, loop: RankLoop, handoff_id: HandoffId) -> None:
        self._loop = loop
        self._handoff_id = handoff_id

    def put(self, message: worker_pb2.SourceMessage) -> None:
        """See `SourceStream`. Renewals and "drained" are rank 0's to send."""
        if message.WhichOneof("message") in ("record", "abort"):
            self._loop.tell(self._handoff_id, rank_pb2.FromRank(from_source=message))

    def finish(self) -> None:
        """See `SourceStream`."""


class SourceRank:
    """Implements `tandem.ranks.follower.HandoffPart`. `enqueue` puts a job behind the batches told before."""

    def __init__(self, side: SourceSide, *, key: ClusterKey, loop: RankLoop, enqueue: Enqueue) -> None:
        self._side = side
        self._key = key
        self._loop = loop
        self._enqueue = enqueue
        self._halves: dict[HandoffId, OutgoingHandoff] = {}
        self._inboxes: dict[HandoffId, Inbox] = {}
        self._shipments = self._none_yet()

    def _none_yet(self) -> Shipments:
        return Shipments(layers=self._side.cache.shard.layers)

    # --- the thread that reads

    def on_frame(self, payload: bytes) -> None:
        """See `HandoffPart`."""
        message = rank_pb2.ToRank.FromString(payload)
        handoff_id = HandoffId(message.handoff_id)
        match message.WhichOneof("message"):
            case "ship":
                self._enqueue(lambda: self._ship(handoff_id, message.ship))
            case "ask_record":
                self._enqueue(lambda: self._record(handoff_id))
            case "open_source":
                self._loop.soon(lambda: self._open(message.open_source))
            case "from_destination":
                self._loop.soon(lambda: self._hear(handoff_id, message.from_destination))
            case "peer_lost":
                self._loop.soon(lambda: self._hear(handoff_id, None))

    # --- compute thread

    def _ship(self, handoff_id: HandoffId, ship: rank_pb2.Ship) -> None:
        half = self._halves.get(handoff_id)
        if half is None:
            return
        layers = self._side.cache.shard.layers
        whole = BlockRange(
            layer=layers.start, num_layers=len(layers), first_block=ship.first_block, num_blocks=ship.num_blocks
        )
        block_ids = tuple(BlockId(block) for block in ship.block_ids)
        self._shipments.add_sized(half, whole, block_ids, layers_per_message=ship.layers_per_message)

    def layer_hook(self) -> LayerHook:
        """See `HandoffPart`."""
        shipments, self._shipments = self._shipments, self._none_yet()
        first = self._side.cache.shard.layers.start
        return lambda layer: shipments.written(first + layer)

    def _record(self, handoff_id: HandoffId) -> None:
        half = self._halves.get(handoff_id)
        if half is not None:
            half.computed((), num_cached_tokens=0)

    # --- event loop

    def _open(self, opened: rank_pb2.OpenSource) -> None:
        claims = claims_of(opened.offer)
        handoff_id = claims.handoff_id
        offer = Offer(
            key=self._key,
            claims=claims,
            num_prompt_tokens=opened.offer.num_prompt_tokens,
            fingerprint=opened.offer.fingerprint,
        )
        half = OutgoingHandoff(
            offer,
            side=self._side,
            machine=SourceHandoff(
                lease_s=opened.lease_s, max_resends=opened.max_resends, now=time.monotonic()
            ),
            callbacks=HandoffCallbacks(
                ticket=lambda: self._loop.tell(handoff_id, rank_pb2.FromRank(ready=rank_pb2.RankReady())),
                failed=lambda error: logger.info("handoff %s fails on this rank: %s", handoff_id, error),
                ended=lambda: self._loop.soon(lambda: self._end(handoff_id)),
            ),
            control=_ToRank0(self._loop, handoff_id),
        )
        self._halves[handoff_id] = half
        inbox = self._inboxes[handoff_id] = Inbox()
        self._loop.spawn(self._follow(half, inbox))
        self._loop.spawn(self._pulse(half))

    async def _pulse(self, half: OutgoingHandoff) -> None:
        """Rank 0 is there as long as the connection to it is; what time brings is that stuck sends are fenced."""
        while not half.ended:
            await asyncio.sleep(TICK_S)
            await half.on_message(worker_pb2.DestinationMessage(renewed=worker_pb2.LeaseRenewal()))
            half.on_tick(time.monotonic(), renew=False)

    async def _follow(self, half: OutgoingHandoff, inbox: Inbox) -> None:
        """What the decode worker says, in order, until this half has ended."""
        while not half.ended:
            if (message := await inbox.get()) is None:
                half.on_end(None)
            else:
                await half.on_message(message)

    def _hear(self, handoff_id: HandoffId, message: worker_pb2.DestinationMessage | None) -> None:
        """None: it is gone."""
        inbox = self._inboxes.get(handoff_id)
        if inbox is not None:
            inbox.put_nowait(message)

    def _end(self, handoff_id: HandoffId) -> None:
        if (inbox := self._inboxes.pop(handoff_id, None)) is not None:
            inbox.put_nowait(None)
        half = self._halves.pop(handoff_id, None)
        if half is not None:
            ended = rank_pb2.RankEnded(
                whole=True,
                sent=[_to_proto(message) for message in half.messages],
                links=[link_status(each) for each in self._side.links.links()],
            )
            self._loop.tell(handoff_id, rank_pb2.FromRank(ended=ended))

    def close(self) -> None:
        """See `HandoffPart`."""
        self._side.links.close()  # what is under way fails now, while there is a loop to say so
        self._loop.close()


def _to_proto(message: SentMessage) -> rank_pb2.SentRange:
    blocks = message.blocks
    return rank_pb2.SentRange(
        layer=blocks.layer,
        num_layers=blocks.num_layers,
        first_block=blocks.first_block,
        num_blocks=blocks.num_blocks,
        destination_rank=blocks.destination,
        num_bytes=message.num_bytes,
        posted_s=message.posted_s,
        done_s=message.done_s,
    )

