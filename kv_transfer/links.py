"""The links of one prefill worker, one for each address that tickets have named. Decides nothing about handoffs."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass

from kv_transfer.transport import Link, LinkStats, Transport
from tandem.types import WorkerId

MAX_LINKS_PER_WORKER = 4
"""A worker that starts again has a new address; links to its earlier lives fall out by themselves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Known:
    worker_id: WorkerId
    link: Link


class LinkTable:
    """Event loop only. A link is found by the transport address in the ticket, so no ticket can take another's link."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._links: OrderedDict[bytes, _Known] = OrderedDict()

    async def get(self, worker_id: WorkerId, address: bytes) -> Link:
        """The link to this address, opened if needed. Raises TransportError."""
        known = self._links.get(address)
        if known is None:
            link = await asyncio.to_thread(self._transport.connect, address)
            known = self._links.get(address)
            if known is not None:
                link.close()
                return known.link
            known = self._links[address] = _Known(worker_id=worker_id, link=link)
            self._prune(worker_id)
        self._links.move_to_end(address)
        return known.link

    def _prune(self, worker_id: WorkerId) -> None:
        addresses = [address for address, known in self._links.items() if known.worker_id == worker_id]
        for address in addresses[:-MAX_LINKS_PER_WORKER]:
            self._links.pop(address).link.close()

    def drop(self, link: Link) -> None:
        """Closes a link and forgets it. Idempotent."""
        for address, known in list(self._links.items()):
            if known.link is link:
                del self._links[address]
        link.close()

    def stats(self) -> list[tuple[WorkerId, str, LinkStats]]:
        """(peer, detail, counters) of every open link."""
        return [(known.worker_id, known.link.detail, known.link.stats()) for known in self._links.values()]

    def close(self) -> None:
        """Closes all links."""
        for known in list(self._links.values()):
            self.drop(known.link)
