"""What stores and workers say of their caches, in the words of the API. Sorts and adds up; asks nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tandem.rpc.tandem.v1 import inference_pb2, store_pb2

NO_STORES = "this cluster keeps prefixes in its workers' own memory only: set prefix_store.host_bytes"
NOT_KEPT = "this cluster keeps no prefixes: set prefix_store.enabled"


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedBlock:
    """A block that one node lists; its model's blocks have `block_size` tokens, 0 where that is not known."""

    node: str
    block: store_pb2.StoreBlock
    block_size: int


def merged(
    found: Iterable[NamedBlock], *, limit: int, tenant: Callable[[str], str]
) -> list[inference_pb2.CachedPrefix]:
    """One entry for each block, whichever nodes list it; the `limit` most used ones, shorter prefixes first."""
    prefixes: dict[bytes, inference_pb2.CachedPrefix] = {}
    for each in found:
        block = each.block
        if block.name not in prefixes:
            prefixes[block.name] = inference_pb2.CachedPrefix(
                block=block.name.hex(),
                num_blocks=block.depth + 1,
                num_tokens=(block.depth + 1) * each.block_size,
                tenant=tenant(block.tenant),
            )
        prefix = prefixes[block.name]
        prefix.num_uses += block.num_uses
        prefix.is_pinned = prefix.is_pinned or block.pinned
        prefix.nodes.append(each.node)
    return sorted(prefixes.values(), key=lambda p: (-p.num_uses, p.num_blocks, p.block))[:limit]


def node_cache(node: str, stats: store_pb2.StoreStats | None, *, error: str) -> inference_pb2.NodeCache:
    """A store's counts, in bytes too; `error` is why there are none."""
    if stats is None:
        return inference_pb2.NodeCache(node=node, error=error)
    return inference_pb2.NodeCache(
        node=node,
        block_bytes=stats.block_bytes,
        fingerprint=stats.fingerprint,
        num_clients=stats.num_clients,
        tiers=[_tier_cache(tier, stats.block_bytes) for tier in stats.tiers],
    )


def _tier_cache(tier: store_pb2.StoreTierStats, block_bytes: int) -> inference_pb2.TierCache:
    return inference_pb2.TierCache(
        tier=tier.tier,
        num_blocks=tier.num_blocks,
        capacity_blocks=tier.capacity_blocks,
        num_pinned=tier.num_pinned,
        num_hits=tier.num_hits,
        num_misses=tier.num_misses,
        num_evictions=tier.num_evictions,
        num_damaged=tier.num_damaged,
        num_bytes=tier.num_blocks * block_bytes,
        capacity_bytes=tier.capacity_blocks * block_bytes,
    )


def worker_cache(status: inference_pb2.WorkerStatus) -> inference_pb2.WorkerCache:
    """What a worker's status says of its own blocks."""
    return inference_pb2.WorkerCache(
        worker_id=status.worker_id,
        role=status.role,
        state=status.state,
        node=status.node,
        num_blocks=status.num_blocks,
        device=status.device_tier if status.HasField("device_tier") else None,
    )
