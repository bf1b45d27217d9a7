"""The links of one prefill worker, one for each address that tickets have named. Decides nothing about handoffs.

Each link is measured when it is opened, and held against the floor that the configuration sets.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass

import torch

from kv_transfer.probe import PROBE_BYTES, measure
from kv_transfer.sizing import LinkSpeed
from kv_transfer.transport import Link, LinkStats, Transport
from tandem.errors import LinkClosed, LinkTooSlow, TransportError
from tandem.types import Epoch, WorkerId

logger = logging.getLogger(__name__)

MAX_LINKS_PER_WORKER = 4
"""For each rank. A worker that starts again has a new address; links to its earlier lives fall out by themselves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenLink:
    """One of the table's links, as status and metrics show it. `slow`: below the floor."""

    worker_id: WorkerId
    epoch: Epoch
    """The peer's incarnation."""
    link: Link
    speed: LinkSpeed
    slow: bool
    probed: LinkStats
    """What the probe took."""

    def stats(self) -> LinkStats:
        """Counters of its traffic, without the probe."""
        stats = self.link.stats()
        return LinkStats(
            num_bytes=stats.num_bytes - self.probed.num_bytes,
            num_messages=stats.num_messages - self.probed.num_messages,
            busy_s=stats.busy_s - self.probed.busy_s,
            num_gathers=stats.num_gathers - self.probed.num_gathers,
        )


class LinkTable:
    """Event loop only. A link is found by the transport address in the ticket, so no ticket can take another's link.

    `min_gbps` is the floor in GB/s, 0 for none; with `strict` a link below it is refused.
    """

    def __init__(self, transport: Transport, *, min_gbps: float = 0.0, strict: bool = False) -> None:
        self._transport = transport
        self._min_gbps = min_gbps
        self._strict = strict
        self._links: OrderedDict[bytes, OpenLink] = OrderedDict()
        self._opening: dict[bytes, asyncio.Future[OpenLink]] = {}
        self._closed = False
        self._probe_memory: torch.Tensor | None = None
        self._probing = threading.Lock()

    async def get(
        self, worker_id: WorkerId, address: bytes, *, epoch: Epoch, num_ranks: int = 1
    ) -> tuple[Link, LinkSpeed]:
        """The link to this address of one incarnation of a worker of `num_ranks`, opened and measured if needed.

        Raises TransportError; LinkTooSlow when strict.
        """
        known = self._links.get(address)
        if known is None:
            opening = self._opening.get(address)
            if opening is None:
                opening = asyncio.ensure_future(self._add(worker_id, address, epoch, num_ranks))
                self._opening[address] = opening
                opening.add_done_callback(lambda done: self._opened(address, done))
            known = await asyncio.shield(opening)  # whoever gives up waiting leaves the link to the next one
        if address in self._links:
            self._links.move_to_end(address)
        return known.link, known.speed

    async def _add(self, worker_id: WorkerId, address: bytes, epoch: Epoch, num_ranks: int) -> OpenLink:
        opened = await asyncio.to_thread(self._open, worker_id, address, epoch)
        if self._closed:
            opened.link.close()
            raise LinkClosed("the links of this worker are closed")
        self._links[address] = opened
        self._prune(worker_id, MAX_LINKS_PER_WORKER * num_ranks)
        return opened

    def _opened(self, address: bytes, done: asyncio.Future[OpenLink]) -> None:
        del self._opening[address]
        if not done.cancelled() and (error := done.exception()) is not None:
            logger.info("no link: %s", error)  # and whoever still waits is told by `get`

    def _open(self, worker_id: WorkerId, address: bytes, epoch: Epoch) -> OpenLink:
        link = self._transport.connect(address)
        try:
            with self._probing:  # two at once would measure one another
                if self._probe_memory is None:
                    self._probe_memory = self._transport.allocate(PROBE_BYTES)
                speed = measure(link, self._probe_memory)
            return self._judged(worker_id, epoch, link, speed=speed)
        except TransportError:
            link.close()
            raise

    def _judged(self, worker_id: WorkerId, epoch: Epoch, link: Link, *, speed: LinkSpeed) -> OpenLink:
        gbps = speed.bytes_per_s / 1e9
        slow = gbps < self._min_gbps
        text = f"{link.transport} ({link.detail}) to {worker_id}: {gbps:.3g} GB/s, {speed.latency_s * 1e6:.0f} µs"
        if slow and self._strict:
            raise LinkTooSlow(f"{text}; transfer.strict asks for {self._min_gbps:g} GB/s", param="transfer.min_gbps")
        if slow:
            logger.warning("slow link: %s; transfer.min_gbps is %g", text, self._min_gbps)
        else:
            logger.info("link: %s", text)
        return OpenLink(worker_id=worker_id, epoch=epoch, link=link, speed=speed, slow=slow, probed=link.stats())

    def _prune(self, worker_id: WorkerId, num_kept: int) -> None:
        addresses = [address for address, known in self._links.items() if known.worker_id == worker_id]
        for address in addresses[:-num_kept]:
            self._links.pop(address).link.close()

    def drop(self, link: Link) -> None:
        """Closes a link and forgets it. Idempotent."""
        for address, known in list(self._links.items()):
            if known.link is link:
                del self._links[address]
        link.close()

    def links(self) -> list[OpenLink]:
        """Every open link."""
        return list(self._links.values())

    def close(self) -> None:
        """Closes all links, those too that are still being opened, when they are."""
        self._closed = True
        for known in list(self._links.values()):
            self.drop(known.link)
