"""The process around a worker: event loop thread, gRPC server, registration and heartbeats, drain and stop.

Owns the order of bring-up and tear-down, the same in both pools; what a worker does is its pool's.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import grpc
from prometheus_client import CollectorRegistry
from redis.exceptions import RedisError

from tandem.config import ClusterConfig, from_mapping
from tandem.key_source import load_key
from tandem.observability.server import MetricsServer, serve_metrics
from tandem.registry import Registry, WorkerLoad, WorkerRecord
from tandem.rpc.authentication import CallGuard
from tandem.rpc.server import RpcServer, start_server
from tandem.secret import ClusterKey
from tandem.tasks import cancel_all
from tandem.types import Epoch, Role, WorkerId

logger = logging.getLogger(__name__)

T = TypeVar("T")
_LAST_WORDS_S = 1.0
"""Time that ended requests have to tell the router so."""


StartRank = Callable[[str, dict[str, Any]], None]
"""Starts another rank of this worker: its class ("module:Class") and the one argument of that."""


class Mark(Protocol):
    """Books a start-up phase by its name."""

    def __call__(self, phase: str, took_s: float | None = None) -> None:
        """It ends now; or (`took_s`) it took so long, beside others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSettings:
    """What a worker process is told by whoever starts it."""

    config: ClusterConfig
    worker_id: WorkerId
    redis_url: str
    host: str
    cores: tuple[int, ...]
    key: ClusterKey
    generation: int = 0
    node: str = ""
    store_node: str = ""
    """The Ray node, by which its prefix store is found."""
    start_rank: StartRank | None = None
    """Needed where a worker has several ranks."""
    on_crash: Callable[[BaseException], None] | None = None
    """Instead of the end of the process, for workers that live in a process with others."""

    @classmethod
    def from_mapping(cls, values: dict[str, Any]) -> WorkerSettings:
        """From plain data: config, worker_id, redis_url, host, cores, and optionally generation and node; `start_rank`
        is put in by this process.

        The cluster's key is this process's own knowledge, never part of what travels through Ray. Raises ConfigError.
        """
        config = from_mapping(values["config"])
        return cls(
            config=config,
            key=load_key(config),
            worker_id=WorkerId(values["worker_id"]),
            redis_url=values["redis_url"],
            host=values["host"],
            cores=tuple(values["cores"]),
            generation=int(values.get("generation", 0)),
            node=str(values.get("node", "")),
            store_node=str(values.get("store_node", "")),
            start_rank=values.get("start_rank"),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFacts:
    """What a worker publishes of itself and does not change."""

    role: Role
    fingerprint: str
    model: str
    max_context_tokens: int
    model_context_tokens: int
    """What the model itself could take, blocks or no blocks."""
    num_blocks: int
    block_size: int
    transport: str
    compute: str = ""
    """Device, precision and kernels, for people."""


class HostedWorker(Protocol):
    """What a pool's worker offers to the process around it. Async methods run on the host's event loop."""

    facts: WorkerFacts
    metrics_url: str
    """Set by the host; part of the worker's status."""

    @property
    def metrics(self) -> CollectorRegistry:
        """What it exports."""

    def register(self, server: grpc.aio.Server) -> None:
        """Adds its gRPC services."""

    def service_names(self) -> Sequence[str]:
        """Their full names, for reflection and health."""

    def load(self) -> WorkerLoad:
        """How busy it is now."""

    def start_draining(self) -> None:
        """Refuses new requests from now on."""

    async def wait_idle(self) -> None:
        """Returns when nothing runs, waits or moves."""

    def end_requests(self) -> None:
        """Ends those that have not ended, with an error that says why: the worker is about to close."""

    async def close(self) -> None:
        """Ends everything that still runs and frees all memory."""


Build = Callable[["WorkerSettings", Epoch, Mark], Awaitable[HostedWorker]]
"""Makes a worker on the event loop."""


class WorkerHost:
    """Runs one worker. The constructor only starts the thread; `ready` waits for it."""

    def __init__(self, settings: WorkerSettings, role: Role, build: Build) -> None:
        self.settings = settings
        self.role = role
        self.startup: dict[str, float] = {}
        self._build = build
        self._phase_s = time.monotonic()
        self._ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._loop = asyncio.new_event_loop()
        self._worker: HostedWorker | None = None
        self._server: RpcServer | None = None
        self._metrics: MetricsServer | None = None
        self._registry: Registry | None = None
        self._record: WorkerRecord | None = None
        self._heartbeat: asyncio.Task[None] | None = None
        self._stopped = False
        if settings.cores:
            os.sched_setaffinity(0, settings.cores)
        self._thread = threading.Thread(target=self._loop.run_forever, name="worker-loop", daemon=True)
        self._thread.start()
        self._submit(self._start()).add_done_callback(self._started)

    def mark(self, phase: str, took_s: float | None = None) -> None:
        """Books the time since the last mark to a start-up phase; with `took_s`, that long."""
        if took_s is not None:
            self.startup[phase] = took_s
            return
        now = time.monotonic()
        self.startup[phase] = now - self._phase_s
        self._phase_s = now

    def ready(self) -> dict[str, Any]:
        """Blocks until the worker is registered. Raises what the start raised."""
        self._ready.result()
        assert self._record is not None
        return {
            "worker_id": self._record.worker_id,
            "role": str(self.role),
            "address": self._record.address,
            "pid": os.getpid(),
            "startup": self.startup,
        }

    def drain(self, timeout_s: float) -> bool:
        """Stops admission, tells the registry, and waits; whether the worker became idle in time."""
        return self._submit(self._drain(timeout_s)).result()

    def stop(self) -> None:
        """Deregisters, ends what still runs, frees everything. Idempotent."""
        if not self._stopped:
            self._stopped = True
            self._submit(self._stop()).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _started(self, future: concurrent.futures.Future[None]) -> None:
        error = future.exception()
        if error is None:
            self._ready.set_result(None)
        else:
            self._ready.set_exception(error)

    async def _start(self) -> None:
        settings = self.settings
        registry = settings.config.registry
        self._registry = Registry(settings.redis_url, cluster=settings.config.cluster, ttl_s=registry.ttl_s)
        epoch = await self._registry.next_epoch()
        self._worker = worker = await self._build(settings, epoch, self.mark)
        self._server = await start_server(
            settings.host, 0, worker.register, worker.service_names(), guard=CallGuard(settings.key)
        )
        self._metrics = await serve_metrics(worker.metrics, settings.host)
        worker.metrics_url = self._metrics.url
        facts = worker.facts
        self._record = WorkerRecord(
            worker_id=settings.worker_id,
            role=self.role,
            address=self._server.address,
            epoch=epoch,
            fingerprint=facts.fingerprint,
            model=facts.model,
            max_context_tokens=facts.max_context_tokens,
            model_context_tokens=facts.model_context_tokens,
            num_blocks=facts.num_blocks,
            block_size=facts.block_size,
            transport=facts.transport,
            pid=os.getpid(),
            generation=settings.generation,
            node=settings.node,
            store_node=settings.store_node,
            metrics_url=worker.metrics_url,
            load=worker.load(),
        )
        await self._server.set_serving(True)
        await self._registry.put(self._record)
        self._heartbeat = asyncio.create_task(self._beat(registry.heartbeat_s))
        self.mark("register")

    async def _beat(self, period_s: float) -> None:
        while True:
            await asyncio.sleep(period_s)
            await self._renew()

    async def _renew(self) -> None:
        assert self._record is not None
        assert self._registry is not None
        assert self._worker is not None
        try:
            await self._registry.put(replace(self._record, load=self._worker.load()))
        except RedisError as exc:
            logger.warning("registration not renewed, Redis is away: %s", exc)

    async def _drain(self, timeout_s: float) -> bool:
        if self._worker is None or self._record is None:
            return True
        self._worker.start_draining()
        self._record = replace(self._record, state="draining")
        await self._renew()
        try:
            async with asyncio.timeout(timeout_s):
                await self._worker.wait_idle()
        except TimeoutError:
            return False
        return True

    async def _stop(self) -> None:
        if self._heartbeat is not None:
            await cancel_all([self._heartbeat])
        if self._registry is not None and self._record is not None:
            try:
                await self._registry.remove(self._record.worker_id)
            except RedisError as exc:
                logger.warning("registration not removed, Redis is away: %s", exc)
        if self._worker is not None:
            self._worker.start_draining()
            self._worker.end_requests()
        if self._server is not None:
            await self._server.stop(_LAST_WORDS_S)
        if self._metrics is not None:
            await self._metrics.stop()
        if self._worker is not None:
            await self._worker.close()
        if self._registry is not None:
            await self._registry.close()
