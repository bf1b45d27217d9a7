"""A decode worker's rank other than 0: its halves of handoffs, each with a control stream that runs to rank 0.

The prefill worker's ranks write into it straight; rank 0 speaks with the prefill worker, and says what it says here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from kv_transfer.destination import DestinationHandoff
from kv_transfer.incoming import IncomingHandoff, ReceiveCallbacks
from kv_transfer.offer import claims_of
from kv_transfer.rank_loop import RankLoop
from kv_transfer.receiver import HandoffReceiver
from tandem.model.executor import LayerHook
from tandem.rpc.tandem.v1 import rank_pb2, worker_pb2
from tandem.types import BlockId, HandoffId

Inbox = asyncio.Queue[worker_pb2.SourceMessage | None]


class DestinationRank:
    """Implements `tandem.ranks.follower.HandoffPart`."""

    def __init__(self, receiver: HandoffReceiver, loop: RankLoop) -> None:
        self._receiver = receiver
        self._loop = loop
        self._inboxes: dict[HandoffId, Inbox] = {}

    # --- the thread that reads

    def on_frame(self, payload: bytes) -> None:
        """See `HandoffPart`."""
        message = rank_pb2.ToRank.FromString(payload)
        handoff_id = HandoffId(message.handoff_id)
        match message.WhichOneof("message"):
            case "open_destination":
                self._loop.soon(lambda: self._open(message.open_destination))
            case "from_source":
                self._loop.soon(lambda: self._hear(handoff_id, message.from_source))
            case "peer_lost":
                self._loop.soon(lambda: self._hear(handoff_id, None))

    def layer_hook(self) -> LayerHook | None:
        """See `HandoffPart`."""
        return None

    # --- event loop

    def _open(self, opened: rank_pb2.OpenDestination) -> None:
        claims = claims_of(opened.offer)
        machine = DestinationHandoff(
            epoch=claims.destination_epoch,
            lanes=self._receiver.lanes_from(claims),
            num_blocks=opened.num_blocks,
            lease_s=opened.lease_s,
            now=time.monotonic(),
        )
        half = IncomingHandoff(
            claims=claims,
            machine=machine,
            desk=self._receiver,
            now=time.time(),
            callbacks=ReceiveCallbacks(
                delivered=lambda record: None, failed=lambda error: None, released=lambda: None
            ),
        )
        self._receiver.open(half)
        inbox = self._inboxes[claims.handoff_id] = Inbox()
        half.reserved(tuple(BlockId(block) for block in opened.block_ids), first_block=opened.first_block)
        self._loop.spawn(self._converse(half, inbox))

    def _hear(self, handoff_id: HandoffId, message: worker_pb2.SourceMessage | None) -> None:
        inbox = self._inboxes.get(handoff_id)
        if inbox is not None:
            inbox.put_nowait(message)

    async def _converse(self, half: IncomingHandoff, inbox: Inbox) -> None:
        """Until nothing is written here any more: then rank 0 is told, and whether all was."""
        handoff_id = half.handoff_id
        async for message in self._receiver.converse(half, _messages(inbox)):
            kind = message.WhichOneof("message")
            if kind == "ticket":
                self._loop.tell(handoff_id, rank_pb2.FromRank(ready=rank_pb2.RankReady()))
            elif kind in ("nack", "abort"):
                self._loop.tell(handoff_id, rank_pb2.FromRank(from_destination=message))
        del self._inboxes[handoff_id]
        ended = rank_pb2.RankEnded(
            whole=half.is_whole, num_bytes=half.num_bytes, num_messages=half.num_messages
        )
        self._loop.tell(handoff_id, rank_pb2.FromRank(ended=ended))

    def close(self) -> None:
        """See `HandoffPart`."""
        self._loop.close()


async def _messages(inbox: Inbox) -> AsyncIterator[worker_pb2.SourceMessage]:
    while (message := await inbox.get()) is not None:
        yield message
