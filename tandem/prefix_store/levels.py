"""How full a store's tiers are and who uses it: for metrics and for status. Reads only."""

from __future__ import annotations

from prometheus_client import Counter

from tandem.kv.tiering import Tier
from tandem.observability.store_metrics import StoreSample, TierLevel
from tandem.prefix_store.sessions import SessionTable
from tandem.prefix_store.store import NodeStore
from tandem.rpc.tandem.v1 import store_pb2


class StoreLevels:
    """Of one store and its clients."""

    def __init__(self, store: NodeStore, sessions: SessionTable) -> None:
        self._store = store
        self._sessions = sessions

    def sample(self) -> StoreSample:
        """The store now."""
        host = self._store.host
        tiers = {
            "host": TierLevel(
                num_blocks=len(host),
                capacity_blocks=self._store.settings.num_slots,
                num_pinned=host.num_pinned,
                num_reserved=host.num_reserved,
                num_evictions=host.num_evictions,
            )
        }
        if self._store.disk is not None:
            disk = self._store.disk.stats()
            tiers["disk"] = TierLevel(
                num_blocks=disk.blocks,
                capacity_blocks=disk.max_blocks,
                num_pinned=self._store.num_pinned_on_disk,
                num_evictions=disk.counters.evictions,
            )
        return StoreSample(
            tiers=tiers,
            num_clients=self._sessions.num_clients,
            num_loans=self._sessions.num_loans,
            num_grants=self._sessions.num_grants,
        )

    def stats(self, node: str) -> store_pb2.StoreStats:
        """The same with what was counted so far, as it travels."""
        sample = self.sample()
        settings, metrics = self._store.settings, self._store.metrics
        tiers = {**sample.tiers, Tier.REMOTE: TierLevel(num_blocks=0, capacity_blocks=0)}
        return store_pb2.StoreStats(
            node=node,
            fingerprint=settings.fingerprint,
            block_bytes=settings.block_bytes,
            num_clients=sample.num_clients,
            num_loans=sample.num_loans,
            num_grants=sample.num_grants,
            tiers=[
                store_pb2.StoreTierStats(
                    tier=tier,
                    num_blocks=level.num_blocks,
                    capacity_blocks=level.capacity_blocks,
                    num_pinned=level.num_pinned,
                    num_reserved=level.num_reserved,
                    num_hits=_count(metrics.hits, tier),
                    num_misses=_count(metrics.misses, tier),
                    num_evictions=level.num_evictions,
                    num_damaged=_count(metrics.damaged, tier),
                )
                for tier, level in tiers.items()
            ],
        )


def _count(counter: Counter, tier: str) -> int:
    """What a counter stands at."""
    (family,) = counter.collect()
    return sum(int(s.value) for s in family.samples if s.labels.get("tier") == tier and s.name.endswith("_total"))
