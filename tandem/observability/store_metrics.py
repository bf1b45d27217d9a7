"""What a node's prefix store exports. Booked once for each load, write or call; levels are read at scrapes.

Label values: the tiers, a closed set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from prometheus_client import Counter, Histogram

from tandem.observability.metric_set import MetricSet, Reading, plain, reading

TIERS = ("host", "disk", "remote")
_BUCKETS = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class TierLevel:
    """One tier now. `num_reserved`: slots that nobody can see yet."""

    num_blocks: int
    capacity_blocks: int
    num_pinned: int = 0
    num_reserved: int = 0
    num_evictions: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreSample:
    """The store now: its own tiers by name, and who uses it."""

    tiers: Mapping[str, TierLevel] = field(default_factory=dict)
    num_clients: int = 0
    num_loans: int = 0
    num_grants: int = 0
    num_slow_links: int = 0


_LABEL = ("tier",)

_READINGS: tuple[Reading[StoreSample], ...] = (
    reading(
        ("tandem_store_used_blocks", "gauge", "blocks", "Blocks that can be found in a tier."),
        lambda s: [((tier,), level.num_blocks) for tier, level in s.tiers.items()],
        labels=_LABEL,
    ),
    reading(
        ("tandem_store_capacity_blocks", "gauge", "blocks", "Blocks that a tier can hold."),
        lambda s: [((tier,), level.capacity_blocks) for tier, level in s.tiers.items()],
        labels=_LABEL,
    ),
    reading(
        ("tandem_store_pinned_blocks", "gauge", "blocks", "Blocks that people keep against eviction."),
        lambda s: [((tier,), level.num_pinned) for tier, level in s.tiers.items()],
        labels=_LABEL,
    ),
    reading(
        ("tandem_store_reserved_blocks", "gauge", "blocks", "Slots of the host tier that are being written."),
        lambda s: [((tier,), level.num_reserved) for tier, level in s.tiers.items() if tier == "host"],
        labels=_LABEL,
    ),
    reading(
        ("tandem_store_evicted_blocks_total", "counter", "blocks", "Blocks that made room for others."),
        lambda s: [((tier,), level.num_evictions) for tier, level in s.tiers.items()],
        labels=_LABEL,
    ),
    reading(("tandem_store_clients", "gauge", "workers", "Workers that are attached."), lambda s: plain(s.num_clients)),
    reading(
        ("tandem_store_loans", "gauge", "loans", "Prefixes that are kept in the host tier for readers."),
        lambda s: plain(s.num_loans),
    ),
    reading(
        ("tandem_store_grants", "gauge", "grants", "Groups of slots that workers are writing."),
        lambda s: plain(s.num_grants),
    ),
    reading(
        (
            "tandem_store_slow_links",
            "gauge",
            "links",
            "Links to other nodes' stores that were measured slower than transfer.min_gbps: alert on it.",
        ),
        lambda s: plain(s.num_slow_links),
    ),
)


class StoreMetrics(MetricSet):
    """Event loop only."""

    def __init__(self) -> None:
        super().__init__()
        self.hits = self._of_tier("tandem_store_hit_blocks_total", "Blocks that were wanted and had from a tier.")
        self.misses = self._of_tier("tandem_store_missed_blocks_total", "Blocks that were wanted and not in a tier.")
        self.read_bytes = self._of_tier("tandem_store_read_bytes_total", "Bytes loaded from a tier.", unit="bytes")
        self.written_bytes = self._of_tier("tandem_store_written_bytes_total", "Bytes put into a tier.", unit="bytes")
        self.damaged = self._of_tier(
            "tandem_store_damaged_blocks_total", "Blocks whose bytes were not as they had been."
        )
        self.refused = self.counter(
            "tandem_store_refused_blocks_total",
            "Blocks for which no room could be made in the host tier.",
            unit="blocks",
        )
        self.skipped = self.counter(
            "tandem_store_skipped_blocks_total", "Blocks not written to disk because it did not keep up.", unit="blocks"
        )
        self.served_bytes = self.counter(
            "tandem_store_served_bytes_total", "Bytes sent to other nodes' stores.", unit="bytes"
        )
        self.acquire_seconds = self._seconds("tandem_store_acquire_seconds", "One loan, loads included.")
        self.load_seconds = {
            "disk": self._seconds("tandem_store_disk_load_seconds", "One load from disk into the host tier."),
            "remote": self._seconds("tandem_store_remote_load_seconds", "One load from another node."),
        }
        self.announce(_READINGS)

    def _of_tier(self, name: str, text: str, *, unit: str = "blocks") -> Counter:
        counter = self.counter(name, text, unit=unit, labels=_LABEL)
        for tier in TIERS:
            counter.labels(tier=tier)
        return counter

    def _seconds(self, name: str, text: str) -> Histogram:
        return self.histogram(name, text, unit="seconds", buckets=_BUCKETS)

    def sampled_by(self, sample: Callable[[], StoreSample]) -> None:
        """Serves levels from `sample`, which is called once for each scrape."""
        self.sampled(sample, _READINGS)
