"""What all handoffs of one prefill worker share on one rank: cache, links, digests, and the worker's other ranks."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kv_transfer.digest import DigestPolicy
from kv_transfer.links import LinkTable
from kv_transfer.plan import lanes
from kv_transfer.posting import OpenLane
from kv_transfer.sizing import LinkSpeed
from kv_transfer.ticket import Reach
from tandem.kv.cache import KvCache
from tandem.kv.sharding import Sharding
from tandem.types import Epoch, WorkerId

if TYPE_CHECKING:
    from kv_transfer.source_ranks import SourceRanks


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceSide:
    """Of one rank. `ranks` are the others, on rank 0 of a worker that has some."""

    cache: KvCache
    links: LinkTable
    digests: DigestPolicy
    ranks: SourceRanks | None = None

    async def open_lanes(
        self, destination: WorkerId, epoch: Epoch, reach: Reach
    ) -> tuple[list[OpenLane], LinkSpeed | None]:
        """Links to all ranks that this one has something for, and the speed of the slowest; there may be none, where
        several ranks hold the same heads.

        Raises TransportError; ConfigError when the destination's cut does not fit the model.
        """
        own = self.cache.sharding
        theirs = Sharding(
            num_layers=own.num_layers,
            num_kv_heads=own.num_kv_heads,
            block_size=own.block_size,
            tp=reach.tp,
            pp=reach.pp,
        )
        wanted = [lane for lane in lanes(own, theirs) if lane.source_rank == self.cache.shard.rank]
        addresses = reach.addresses
        found = await asyncio.gather(
            *(
                self.links.get(destination, addresses[each.destination_rank], epoch=epoch, num_ranks=len(addresses))
                for each in wanted
            )
        )
        opened = [OpenLane(lane=lane, link=link) for lane, (link, _) in zip(wanted, found, strict=True)]
        return opened, min((speed for _, speed in found), key=lambda speed: speed.bytes_per_s, default=None)
