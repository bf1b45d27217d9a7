"""A router's life as a process: health at once, then tokenizer and servers, then requests until a signal.

SIGTERM and SIGINT drain; a second one ends the process at once. Below a launcher a router that has drained still
answers operators until the next signal: workers are being ended meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import psutil

from router.admin import PoolAdmin
from router.app import RunningRouter, serve
from router.cache_admin import CacheAdmin
from router.dispatch import ServedModel
from router.dispatcher import Recovery, WorkerDispatcher
from router.grpc_service import SERVICE_NAMES
from router.prefix_hits import PrefixHits
from tandem.config import ClusterConfig
from tandem.key_source import load_key
from tandem.model.files import resolve_model
from tandem.observability.metrics import RouterMetrics
from tandem.pool_state import PoolState
from tandem.prefix_store.follow import PrefixIndexFollower
from tandem.prefix_store.registry import StoreRegistry
from tandem.registry import Registry
from tandem.rpc.health_port import HealthPort, start_health_port
from tandem.tasks import cancel_all


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundRouter:
    """Where a router listens: host:port, a URL, host:port or empty; and its start-up phases in seconds."""

    grpc: str
    http: str
    health: str
    startup: dict[str, float]


class RouterEvents:
    """Is told how far the router has come; this one tells nobody."""

    def bound(self, router: BoundRouter) -> None:
        """Both servers listen."""

    def serving(self, model: ServedModel | None) -> None:
        """Requests will be served, by `model` if it is still there. Once."""

    def drained(self) -> bool:
        """No request is left. Whether to stay for operators until one more signal; with this one, no."""
        return False


class _Signals:
    """Takes SIGTERM and SIGINT from now on; before, the first one ends the process."""

    def __init__(self) -> None:
        self.stopping = asyncio.Event()
        """Set by the first."""
        self.ending = asyncio.Event()
        """Set by the first one after the drain; during it, another one ends the process."""
        self.is_drained = False
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._take, number)

    def _take(self, number: int) -> None:
        if self.is_drained:
            self.ending.set()
        elif self.stopping.is_set():
            os._exit(128 + number)
        self.stopping.set()


async def run_router(config: ClusterConfig, *, redis_url: str, events: RouterEvents) -> None:
    """Serves until a signal, then drains. Raises TandemError when it cannot start."""
    started_s = time.monotonic()
    key = load_key(config)
    startup = {"imports": time.time() - psutil.Process().create_time()}
    serving = asyncio.Event()
    registry = Registry(redis_url, cluster=config.cluster, ttl_s=config.registry.ttl_s)
    state = PoolState(redis_url, cluster=config.cluster)
    stores = StoreRegistry(redis_url, cluster=config.cluster, ttl_s=config.registry.ttl_s)
    metrics = RouterMetrics()
    async with _health_port(config) as health, _prefix_hits(config, redis_url) as hits:
        dispatcher = WorkerDispatcher(
            registry,
            key=key,
            on_change=lambda: _note(dispatcher, serving),
            metrics=metrics,
            hits=hits,
            recovery=Recovery(state=state, patience_s=config.router.patience_s),
        )
        await dispatcher.start()
        try:
            files = await asyncio.to_thread(resolve_model, config.model.source)
            router = await serve(
                config=config,
                dispatcher=dispatcher,
                tokenizer_dir=files.tokenizer_dir,
                admin=PoolAdmin(state, dispatcher, _cache_admin(config, stores, dispatcher)),
                metrics=metrics,
                health=health,
            )
            startup["tokenizer and servers"] = time.monotonic() - started_s
            await _serve(router, config, startup=startup, serving=serving, events=events)
        finally:
            await dispatcher.close()
            await registry.close()
            await state.close()
            await stores.close()


def _note(dispatcher: WorkerDispatcher, serving: asyncio.Event) -> None:
    if dispatcher.ready():
        serving.set()


def _cache_admin(config: ClusterConfig, stores: StoreRegistry, dispatcher: WorkerDispatcher) -> CacheAdmin:
    kept = config.prefix_store
    return CacheAdmin(stores, dispatcher.tracker, is_enabled=kept.enabled, has_stores=kept.host_bytes > 0)


@contextlib.asynccontextmanager
async def _prefix_hits(config: ClusterConfig, redis_url: str) -> AsyncIterator[PrefixHits | None]:
    """Follows what workers and stores announce, while prefixes are kept at all."""
    if not config.prefix_store.enabled:
        yield None
        return
    follower = PrefixIndexFollower(redis_url, cluster=config.cluster)
    follower.start()
    try:
        yield PrefixHits(follower)
    finally:
        await follower.close()


@contextlib.asynccontextmanager
async def _health_port(config: ClusterConfig) -> AsyncIterator[HealthPort | None]:
    router = config.router
    if not router.health_port:
        yield None
        return
    health = await start_health_port(router.host, router.health_port, SERVICE_NAMES)
    try:
        yield health
    finally:
        await health.stop()


async def _serve(
    router: RunningRouter,
    config: ClusterConfig,
    *,
    startup: dict[str, float],
    serving: asyncio.Event,
    events: RouterEvents,
) -> None:
    signals = _Signals()
    try:
        events.bound(
            BoundRouter(
                grpc=router.grpc_address,
                http=router.http_url,
                health=router.health_address,
                startup=startup,
            )
        )
        await _until_stopped(router, serving, signals.stopping, events)
        await router.drain(config.drain_timeout_s)
        signals.is_drained = True
        if events.drained():
            await signals.ending.wait()
    finally:
        await router.stop(config.drain_timeout_s)


async def _until_stopped(
    router: RunningRouter, serving: asyncio.Event, stopping: asyncio.Event, events: RouterEvents
) -> None:
    waits = {asyncio.create_task(serving.wait()), asyncio.create_task(stopping.wait())}
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if serving.is_set():
            events.serving(router.frontend.dispatcher.model())
        await stopping.wait()
    finally:
        await cancel_all(waits)
