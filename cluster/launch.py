"""Brings a cluster up and takes it down: Redis, a Ray node, the controller, which starts the workers, and the router.

Owns the order and the clean-up, whatever fails half way: nothing that was started here is left. Takes down in reverse
order: the router drains first, so that no request loses its workers.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from cluster.cluster_info import ClusterInfo
from cluster.controller_process import ControllerProcess
from cluster.embedded_redis import EmbeddedRedis, check_redis
from cluster.events import WORKERS_PHASE, ModelInfo, Phase, Progress, SilentProgress, WorkerInfo
from cluster.head import HeadOptions, RayHead
from cluster.leftovers import remove_leftovers, temp_parents
from cluster.patience import PATIENCE_S, patiently
from cluster.pools import WORKER_CLASSES
from cluster.process_settings import ProcessSettings
from cluster.processes import kill_children, make_temp_dir
from cluster.ray_node import GRACE_S
from cluster.router_process import NO_ENDPOINTS, ROUTER_COMMAND, RouterEndpoints, RouterProcess
from tandem.config import ClusterConfig
from tandem.errors import ClusterError
from tandem.key_source import provide_key
from tandem.redis_access import PASSWORD_VARIABLE
from tandem.types import Role

A = TypeVar("A")
B = TypeVar("B")

WORKER_HOST = "127.0.0.1"
"""Where workers meet when no other machine can join."""
_END_MARGIN_S = 25.0
"""Time, beyond the drain, in which workers must have ended."""
_ROUTER_MARGIN_S = 20.0
"""The same for the router: it has clients to tell of the cut, and ends slowly on a busy machine."""
_ABANDON_S = 1.5
"""The same for a start that is given up: what has not ended by then is killed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What the processes are made of: replaceable, so that the launcher is testable apart from a model."""

    worker_classes: Mapping[Role, str]
    router_command: tuple[str, ...]


REAL_PARTS = Parts(worker_classes=WORKER_CLASSES, router_command=ROUTER_COMMAND)


async def _both(first: Coroutine[Any, Any, A], second: Coroutine[Any, Any, B]) -> tuple[A, B]:
    """Runs both; when one fails, the other is cancelled and over before the error is raised."""
    one, two = asyncio.create_task(first), asyncio.create_task(second)
    try:
        return await asyncio.gather(one, two)
    finally:
        one.cancel()
        two.cancel()
        await asyncio.gather(one, two, return_exceptions=True)


class ClusterLauncher:
    """Starts and stops one cluster; also an async context manager. `start_timeout_s` bounds the whole start."""

    def __init__(
        self,
        config: ClusterConfig,
        *,
        progress: Progress | None = None,
        verbose: bool = False,
        start_timeout_s: float = 600.0,
        parts: Parts = REAL_PARTS,
        head: HeadOptions | None = None,
    ) -> None:
        self._config = config
        self._progress: Progress = progress or SilentProgress()
        self._verbose = verbose
        self._start_timeout_s = start_timeout_s
        self._parts = parts
        self._redis: EmbeddedRedis | None = None
        self._router: RouterProcess | None = None
        self._head_options = head or HeadOptions()
        self._ray: RayHead | None = None
        self._ray_address = ""
        self._controller: ControllerProcess | None = None
        self._watchers: list[asyncio.Task[None]] = []
        self._phases: list[Phase] = []
        self._began = 0.0
        self._model: ModelInfo | None = None
        self._run_dir: Path | None = None

    async def __aenter__(self) -> ClusterInfo:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> ClusterInfo:
        """Returns when requests will be served, or with a joinable head when nodes may join.

        Raises TandemError; then, as when cancelled, nothing is left.
        """
        self._began = time.monotonic()
        provide_key(self._config, kept=self._head_options.joinable)
        if not self._head_options.joinable:
            for path in await asyncio.to_thread(remove_leftovers, temp_parents()):
                self._progress.note(f"removed {path}: the cluster that made it was killed")
        self._run_dir = make_temp_dir("run")
        try:
            async with asyncio.timeout(self._start_timeout_s):
                return await self._start()
        except TimeoutError as exc:
            await self.stop(drain=False)
            raise ClusterError(f"the cluster was not ready within {self._start_timeout_s:g} s") from exc
        except BaseException:
            await self.stop(drain=False)
            raise

    async def _start(self) -> ClusterInfo:
        redis_url = await self._start_redis()
        endpoints, workers = await _both(self._start_router(redis_url), self._start_pools(redis_url))
        self._watch()
        return ClusterInfo(
            grpc=endpoints.grpc,
            http=endpoints.http,
            redis=redis_url,
            head=self._ray_address,
            workers=tuple(workers),
            startup=tuple(self._phases),
            router_startup=endpoints.startup,
            total_s=time.monotonic() - self._began,
            model=self._model,
        )

    async def _start_redis(self) -> str:
        async with self._phase("Redis"):
            url = self._config.registry.redis_url
            if url:
                patience_s = PATIENCE_S if self._head_options.joinable else 0.0
                await patiently(lambda: check_redis(url), self._progress.note, patience_s=patience_s)
                return url
            os.environ.pop(PASSWORD_VARIABLE, None)  # for some other server: this one has none
            self._redis = EmbeddedRedis()
            await self._redis.start()
            return self._redis.url

    async def _start_router(self, redis_url: str) -> RouterEndpoints:
        assert self._run_dir is not None
        if not self._head_options.has_router:
            return NO_ENDPOINTS
        log = None if self._verbose else self._run_dir / "router.log"
        self._router = RouterProcess(self._config, redis_url=redis_url, log=log, command=self._parts.router_command)
        async with self._phase("router: process, imports, ports"):
            endpoints = await self._router.start()
        if not self._head_options.joinable:
            async with self._phase("router: waiting for workers"):
                self._model = await self._router.serving()
        return endpoints

    async def _start_pools(self, redis_url: str) -> list[WorkerInfo]:
        assert self._run_dir is not None
        options = self._head_options
        log = None if self._verbose else self._run_dir / "ray.log"
        self._ray = RayHead(options, cluster=self._config.cluster, log=log)
        async with self._phase("Ray"):
            self._ray_address = await self._ray.start(redis_url, is_external=self._redis is None)
        log = None if self._verbose else self._run_dir / "controller.log"
        self._controller = ControllerProcess(self._controller_settings(redis_url), log=log)
        if options.joinable:
            await self._controller.start()
            return []
        async with self._phase(WORKERS_PHASE):
            await self._controller.start()
            return await self._controller.workers_ready(self._worker_ready)

    def _controller_settings(self, redis_url: str) -> ProcessSettings:
        options = self._head_options
        return ProcessSettings(
            config=self._config,
            redis_url=redis_url,
            ray_address=self._ray_address,
            worker_host="" if options.joinable else WORKER_HOST,
            classes=self._parts.worker_classes,
            holder=f"{socket.gethostname()}-{os.getpid()}",
            sizes_file=options.sizes_file,
            metrics_host=options.node_ip if options.joinable else WORKER_HOST,
        )

    def _worker_ready(self, info: WorkerInfo) -> None:
        self._progress.note(f"worker {info.worker_id} is ready at {info.address}")

    def _watch(self) -> None:
        assert self._controller is not None
        assert self._ray is not None
        note = self._progress.note
        watching = [self._ray.supervise(note), self._controller.watch(note)]
        if self._router is not None:
            watching.append(self._router.supervise(note))
        if self._redis is not None:
            watching.append(self._redis.supervise(note))
        self._watchers = [asyncio.create_task(watcher) for watcher in watching]

    @asynccontextmanager
    async def _phase(self, name: str) -> AsyncIterator[None]:
        start_s = time.monotonic() - self._began
        self._progress.begin(name)
        yield
        phase = Phase(name=name, start_s=start_s, end_s=time.monotonic() - self._began)
        self._phases.append(phase)
        self._progress.done(phase)

    async def stop(self, *, drain: bool = True) -> None:
        """Drains, then stops everything that was started. Idempotent; goes on past a part that cannot be stopped.

        Raises ClusterError at the end when some part had to be killed.
        """
        await self._end_watchers()
        try:
            killed = await (self._drain() if drain else self._abandon())
        finally:
            self._stop_rest()
        if killed and drain:
            raise ClusterError(f"these processes did not end by themselves and were killed: {', '.join(killed)}")

    async def _drain(self) -> list[str]:
        """First the router's requests, so that none loses its workers; the router itself last, so that it says how far
        the rest has come. Returns what had to be killed.
        """
        drain_s = self._config.drain_timeout_s
        killed: list[str] = []
        try:
            if not await self._drain_router(timeout_s=self._config.router.linger_s + drain_s + _ROUTER_MARGIN_S):
                killed += await self._stop_router(timeout_s=0.0)
        finally:
            try:
                killed += await self._stop_pools(end_s=drain_s + _END_MARGIN_S, drain=drain_s > 0)
            finally:
                if "router" not in killed:
                    killed += await self._stop_router(timeout_s=_ROUTER_MARGIN_S)
        return killed

    async def _abandon(self) -> list[str]:
        """Everything at once: there are no requests."""
        router, pools = await _both(
            self._stop_router(timeout_s=_ABANDON_S), self._stop_pools(end_s=_ABANDON_S, drain=False)
        )
        return router + pools

    async def _drain_router(self, *, timeout_s: float) -> bool:
        return self._router is None or await self._router.drain(timeout_s=timeout_s)

    async def _stop_router(self, *, timeout_s: float) -> list[str]:
        return [] if self._router is None or await self._router.stop(timeout_s=timeout_s) else ["router"]

    async def _end_watchers(self) -> None:
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            watcher.cancel()
        for result in await asyncio.gather(*watchers, return_exceptions=True):
            if isinstance(result, Exception):
                self._progress.note(f"a watcher of the cluster had ended early: {result!r}")

    async def _stop_pools(self, *, end_s: float, drain: bool) -> list[str]:
        controller, self._controller = self._controller, None
        killed = []
        try:
            if controller is not None:
                hands_over = self._head_options.hands_over
                ended = hands_over or await controller.end_workers(timeout_s=end_s, drain=drain)
                if not await controller.stop(timeout_s=min(5.0, end_s)) or not ended:
                    killed.append("controller")
        finally:
            if self._ray is not None:
                killed += await self._ray.stop(timeout_s=min(GRACE_S, end_s))
        return killed

    def _stop_rest(self) -> None:
        if self._redis is not None:
            self._redis.stop()
        if self._run_dir is not None:
            shutil.rmtree(self._run_dir, ignore_errors=True)
            self._run_dir = None

    def force_stop(self) -> None:
        """Kills everything at once; nothing drains. The process should exit right after."""
        kill_children()
        if self._ray is not None:
            self._ray.remove_temp_dir()
        self._stop_rest()
