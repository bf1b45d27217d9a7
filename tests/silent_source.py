"""A prefill worker that takes its ticket and then says and sends only what a test makes it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from kv_transfer.digest import digest
from kv_transfer.transport import Link, MessageHeader
from kv_transfer.transports import make_transport
from tandem.rpc.tandem.v1 import worker_pb2
from tandem.types import Epoch, WorkerId
from tests.legs import Legs, offer_of
from tests.pair import Pair, make_prompt

PROMPT = make_prompt(20)


class SilentSource:
    """A prefill worker that takes its ticket, and then says only what the test makes it say."""

    def __init__(self, legs: Legs) -> None:
        self._legs = legs
        self._transport = make_transport(legs.pair.options.transport, worker_id=WorkerId("silent"))
        self._link: Link | None = None
        self.call: Any = None
        self.ticket = worker_pb2.Ticket()
        self._link_key = b""
        self.offer_message = worker_pb2.HandoffOffer()
        num_bytes = legs.pair.decode.executor.cache.layout.block_layer_bytes
        self._memory = self._transport.allocate(num_bytes)
        self._memory.fill_(7)

    async def offer(self) -> None:
        """Until the ticket is here and the link is open."""
        offer = offer_of(self._legs)
        self.offer_message = offer.message
        self.call = self._legs.pair.decode_stub.Handoff()
        await self.call.write(worker_pb2.SourceMessage(offer=offer.message))
        answer = await self.call.read()
        self.ticket = answer.ticket
        self._link_key = offer.accept(answer.ticket, now=time.time())
        self._link = await asyncio.to_thread(self._transport.connect, answer.ticket.transport_address)

    async def send(
        self, *, layer: int, first_block: int, link_key: bytes | None = None, **changes: Any
    ) -> MessageHeader:
        """One block; returns its header when the transport is done with it. With a `link_key`, under that one's code.

        `changes` are made to the header before it is sealed.
        """
        assert self._link is not None
        honest = MessageHeader(
            handoff_id=self._legs.handoff_id,
            epoch=Epoch(self.ticket.epoch),
            layer=layer,
            first_block=first_block,
            num_blocks=1,
            num_heads=self._legs.pair.decode.executor.cache.layout.num_kv_heads,
            num_bytes=self._memory.numel(),
            digest=digest([self._memory]),
        )
        header = replace(honest, **changes).sealed(self._link_key if link_key is None else link_key)
        await asyncio.wrap_future(self._link.send(header, [self._memory[: header.num_bytes]]))
        return header

    def close(self) -> None:
        self._transport.close()


@asynccontextmanager
async def silent_source(pair: Pair) -> AsyncIterator[tuple[Legs, SilentSource]]:
    legs = Legs(pair, PROMPT)
    await legs.open_decode()
    source = SilentSource(legs)
    try:
        await source.offer()
        yield legs, source
    finally:
        source.close()
