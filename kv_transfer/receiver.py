"""The decode side of all handoffs: the transport's sink, the table of open ones, and their control streams.

What becomes of one of them is `incoming.IncomingHandoff`'s.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

import torch

from kv_transfer.destination_ranks import DestinationParts, DestinationRanks
from kv_transfer.incoming import Arrived, IncomingHandoff
from kv_transfer.offer import TicketOffice
from kv_transfer.plan import Lane, lanes
from kv_transfer.probe import ProbeSink
from kv_transfer.ticket import Claims, Reach
from kv_transfer.transport import MessageHeader, Transport
from tandem.errors import ConfigError, HandoffFailed, TandemError, TransportError
from tandem.kv.cache import KvCache
from tandem.rpc.tandem.v1 import worker_pb2
from tandem.types import HandoffId

logger = logging.getLogger(__name__)

TICK_S = 0.25
"""How often lease clocks are looked at."""


class HandoffReceiver:
    """All open handoffs of a decode worker; the transport's sink."""

    def __init__(
        self, *, cache: KvCache, transport: Transport, office: TicketOffice, ranks: DestinationRanks | None = None
    ) -> None:
        """`ranks` are the others of this worker, on its rank 0."""
        self._cache = cache
        self._ranks = ranks
        self._transport = transport
        self._office = office
        self._handoffs: dict[HandoffId, IncomingHandoff] = {}
        self.arrived = Arrived()
        transport.serve(ProbeSink(self, transport))

    def __len__(self) -> int:
        return len(self._handoffs)

    def place(self, header: MessageHeader) -> Sequence[torch.Tensor] | None:
        """Sink: unknown and stale messages are refused."""
        handoff = self._handoffs.get(header.handoff_id)
        placed = None if handoff is None else handoff.place(header, self._cache)
        if placed is None:
            self.arrived.num_refused += 1
            logger.info("refused a message of handoff %s, layer %d", header.handoff_id, header.layer)
        elif len(placed) > 1:
            self.arrived.num_scattered += 1
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

    def forget(self, handoff: IncomingHandoff) -> None:
        """Called by a handoff that has ended."""
        if self._ranks is not None:
            self._ranks.forget(handoff.handoff_id)
        self._handoffs.pop(handoff.handoff_id, None)

    def link_key(self, claims: Claims) -> bytes:
        """The key of a handoff's messages."""
        return self._office.link_key(claims)

    def ticket(self, handoff: IncomingHandoff, lease_s: float, first_block: int) -> worker_pb2.Ticket:
        """The ticket of a handoff whose blocks are reserved."""
        return self._office.ticket(
            handoff.claims,
            first_block=first_block,
            lease_s=lease_s,
            transport=self._transport.name,
            reach=self._reach(),
        )

    def _reach(self) -> Reach:
        sharding = self._cache.sharding
        others = () if self._ranks is None else self._ranks.addresses
        return Reach(addresses=(self._transport.address(), *others), tp=sharding.tp, pp=sharding.pp)

    def parts(self, handoff: IncomingHandoff) -> DestinationParts | None:
        """The other ranks' halves, on rank 0 of a worker that has some."""
        return None if self._ranks is None else self._ranks.open(handoff)

    def lanes_from(self, claims: Claims) -> list[Lane]:
        """What comes into this rank, from each rank of a source. Raises HandoffFailed when the two do not fit."""
        own = self._cache.sharding
        try:
            source = replace(own, tp=claims.source_tp, pp=claims.source_pp)
            return [lane for lane in lanes(source, own) if lane.destination_rank == self._cache.shard.rank]
        except ConfigError as exc:
            raise HandoffFailed(f"the prefill worker is cut in a way that does not fit: {exc.message}") from exc

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
