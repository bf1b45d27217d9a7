"""What the workers have of a prompt, as they and their nodes' stores announce it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from router.naming import PromptNames
from router.view import CachedPrefix, WorkerView
from tandem.kv.tiering import Tier
from tandem.prefix_store.follow import PrefixIndexFollower
from tandem.prefix_store.registry import owner_of
from tandem.types import WorkerId


class PrefixHits:
    """Event loop only. `follower` is started and closed by whoever made it."""

    def __init__(self, follower: PrefixIndexFollower) -> None:
        self._follower = follower

    def follow(self, workers: Iterable[WorkerView]) -> None:
        """These workers are there now."""
        workers = tuple(workers)
        stores = {owner_of(worker.store_node) for worker in workers if worker.store_node}
        self._follower.follow({*(worker.worker_id for worker in workers), *stores})

    def of(self, names: PromptNames, workers: Iterable[WorkerView]) -> dict[WorkerId, CachedPrefix]:
        """Of each worker that has something, or whose node has. As old as the last announcement: a hint, no promise."""
        matched: dict[str, Mapping[str, Mapping[str, int]]] = {}
        hits = {}
        for worker in workers:
            if worker.fingerprint not in matched:
                prefix = names.of(worker.fingerprint, worker.block_size)
                matched[worker.fingerprint] = self._follower.index.match(prefix.blocks)
            found = matched[worker.fingerprint]
            cached = _cached(worker, found)
            if cached.device or cached.remote:
                hits[worker.worker_id] = cached
        return hits


def _cached(worker: WorkerView, found: Mapping[str, Mapping[str, int]]) -> CachedPrefix:
    own_store = owner_of(worker.store_node) if worker.store_node else ""
    device = found.get(worker.worker_id, {}).get(Tier.DEVICE, 0)
    node = found.get(own_store, {})
    host = max(device, node.get(Tier.HOST, 0))
    disk = max(host, node.get(Tier.DISK, 0))
    others = (tiers.get(Tier.HOST, 0) for owner, tiers in found.items() if owner != own_store) if own_store else ()
    return CachedPrefix(device=device, host=host, disk=disk, remote=max(disk, *others, 0))
