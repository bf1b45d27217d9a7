"""What the parts of one store share: its tiers, its settings, its threads and its metrics."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass

from tandem.observability.store_metrics import StoreMetrics
from tandem.prefix_store.host import HostTier
from tandem.prefix_store.settings import StoreSettings
from tandem.prefix_store.tier import DiskStore, RemoteTier


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreParts:
    """`disk` and `remote` are None where there is none; `pool` takes copies and checksums off the event loop."""

    settings: StoreSettings
    host: HostTier
    disk: DiskStore | None
    remote: RemoteTier | None
    pool: Executor
    metrics: StoreMetrics
