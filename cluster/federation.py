"""One page with the metrics of a node's workers and prefix store, so that a scraper needs to know only the node.

Each one's own page is fetched when somebody scrapes, and its series get the label `worker`; the store's is its name in
announcements. One that does not answer in time is left out, of workers `tandem_node_worker_up` says so.
"""

from __future__ import annotations

import asyncio
import logging
import urllib.request
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from redis.exceptions import RedisError

from cluster.registered import stores_at, workers_at
from tandem.observability.node_metrics import NodeMetrics, NodeSample
from tandem.observability.server import MetricsServer, serve_collected
from tandem.prefix_store.registry import StoreRegistry
from tandem.registry import Registry

logger = logging.getLogger(__name__)

FETCH_TIMEOUT_S = 2.0
LABEL = "worker"
_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Merged(Collector):
    """Families that were collected elsewhere, each once, whoever has it."""

    def __init__(self) -> None:
        self._families: dict[str, Metric] = {}

    def add(self, families: Iterable[Metric], *, worker: str = "") -> None:
        """Adds their samples, with the label `worker` where it is given and not there yet."""
        for family in families:
            kept = self._families.get(family.name)
            if kept is None:
                kept = self._families[family.name] = Metric(family.name, family.documentation, family.type)
            kept.samples += [_labelled(sample, worker) for sample in family.samples]

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        return iter(self._families.values())


def _labelled(sample: Sample, worker: str) -> Sample:
    return sample._replace(labels={LABEL: worker, **sample.labels}) if worker else sample


class Federation:
    """The page of the node at `node_ip`. While Redis is away, those that were last known there are asked."""

    def __init__(self, registry: Registry, stores: StoreRegistry, *, node_ip: str) -> None:
        self._registry = registry
        self._stores = stores
        self._node_ip = node_ip
        self._workers: dict[str, str] = {}
        self._store: dict[str, str] = {}
        self._metrics = NodeMetrics()

    async def collect(self) -> CollectorRegistry:
        """All series as they are now."""
        await self._find()
        urls = self._workers | self._store
        pages = await asyncio.gather(*(asyncio.to_thread(_fetch, name, url) for name, url in urls.items()))
        found = dict(zip(urls, pages, strict=True))
        self._metrics.sample = NodeSample(answered={name: found[name] is not None for name in self._workers})
        merged = Merged()
        merged.add(self._metrics.registry.collect())
        for name, page in found.items():
            merged.add(page or (), worker=name)
        registry = CollectorRegistry()
        registry.register(merged)
        return registry

    async def _find(self) -> None:
        """Their URLs, by name."""
        try:
            workers = await workers_at(self._registry, self._node_ip)
            stores = await stores_at(self._stores, self._node_ip)
        except RedisError as exc:
            logger.warning("Redis is away, asking the last known workers for their metrics: %s", exc)
            return
        self._workers = {str(worker.worker_id): worker.metrics_url for worker in workers if worker.metrics_url}
        self._store = {store.owner: store.metrics_url for store in stores}


def _fetch(name: str, url: str) -> Sequence[Metric] | None:
    """A process's own page; None when it does not come."""
    try:
        with _NO_PROXY.open(url, timeout=FETCH_TIMEOUT_S) as answer:
            return list(text_string_to_metric_families(answer.read().decode()))
    except (OSError, ValueError) as exc:
        logger.warning("no metrics from %s: %s", name, exc)
        return None


async def serve_node_metrics(
    registry: Registry, stores: StoreRegistry, *, node_ip: str, port: int
) -> MetricsServer:
    """Serves the page at the node's address; 0 takes a free port. Raises ClusterError when it cannot be bound."""
    return await serve_collected(Federation(registry, stores, node_ip=node_ip).collect, node_ip, port=port)
