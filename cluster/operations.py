"""Starts, waits for and takes away workers, side by side and one operation per worker. Decides nothing.

What fails is logged, told to the pool's memory, and left to the controller's next turn.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Literal

from redis.exceptions import RedisError

from cluster.controller_settings import ControllerEvents, ControllerSettings
from cluster.events import WorkerInfo
from cluster.placement import WorkerPlacement
from cluster.pool_memory import PoolMemory
from cluster.pools import Pools
from tandem.errors import ClusterError, TandemError
from tandem.observability.controller_metrics import ControllerMetrics
from tandem.registry import Registry
from tandem.tasks import cancel_all
from tandem.types import Role, WorkerId

logger = logging.getLogger(__name__)

Kind = Literal["start", "wait", "drain", "stop"]


class Operations:
    """Event loop only. `on_over` is called whenever one ends."""

    def __init__(
        self,
        pools: Pools,
        registry: Registry,
        *,
        settings: ControllerSettings,
        events: ControllerEvents,
        metrics: ControllerMetrics,
        on_over: Callable[[], None],
    ) -> None:
        self.memories: Mapping[Role, PoolMemory] = {role: PoolMemory(role) for role in Role}
        self.drain_timeout_s = settings.drain_timeout_s
        self._pools = pools
        self._registry = registry
        self._settings = settings
        self._events = events
        self._metrics = metrics
        self._on_over = on_over
        self._running: dict[WorkerId, tuple[Kind, asyncio.Task[None]]] = {}

    def kind(self, worker_id: WorkerId) -> Kind | None:
        """What is being done with a worker now."""
        return self._running[worker_id][0] if worker_id in self._running else None

    @property
    def leaving(self) -> set[WorkerId]:
        """Workers that are being taken away."""
        return {worker_id for worker_id, (kind, _) in self._running.items() if kind in ("drain", "stop")}

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being done."""
        return not self._running

    async def close(self) -> None:
        """Gives everything up; workers stay as they are."""
        await cancel_all([task for _, task in self._running.values()])

    def start(self, placement: WorkerPlacement) -> None:
        """Starts a worker that is not there."""
        memory = self.memories[placement.role]
        memory.order(placement, time.monotonic())
        worker_id = placement.worker_id
        self._begin("start", worker_id, self._bring_up(memory, worker_id, lambda: self._pools.start(placement)))

    def wait(self, role: Role, worker_id: WorkerId) -> None:
        """Waits for a worker that is there but does not serve, unless something is done with it already."""
        if worker_id not in self._running:
            ready = self._bring_up(self.memories[role], worker_id, lambda: self._pools.wait_ready(worker_id))
            self._begin("wait", worker_id, ready)

    async def take_away(self, worker_id: WorkerId, *, drain: bool) -> None:
        """Takes a worker away, unless that is under way; its start or a wait for it is given up."""
        if worker_id in self.leaving:
            return
        if worker_id in self._running:
            await cancel_all([self._running[worker_id][1]])
        self._begin("drain" if drain else "stop", worker_id, self._remove(worker_id, drain=drain))

    def _begin(self, kind: Kind, worker_id: WorkerId, body: Coroutine[Any, Any, None]) -> None:
        logger.info("%s %s", kind, worker_id)
        self._metrics.action(kind)
        task = asyncio.create_task(body, name=f"{kind} {worker_id}")
        self._running[worker_id] = (kind, task)
        task.add_done_callback(lambda _: self._over(worker_id, task))

    def _over(self, worker_id: WorkerId, task: asyncio.Task[None]) -> None:
        if worker_id in self._running and self._running[worker_id][1] is task:
            del self._running[worker_id]
        if not task.cancelled() and task.exception() is not None:
            logger.error("an operation on worker %s failed unexpectedly", worker_id, exc_info=task.exception())
        else:
            self._on_over()

    async def _bring_up(
        self, memory: PoolMemory, worker_id: WorkerId, ready: Callable[[], Coroutine[Any, Any, WorkerInfo]]
    ) -> None:
        try:
            info = await ready()
        except TandemError as exc:
            await self._not_ready(memory, worker_id, exc)
        except BaseException:
            memory.withdraw(worker_id)
            raise
        else:
            memory.started(worker_id, error=False, now=time.monotonic())
            logger.info("worker %s is ready at %s", worker_id, info.address)
            self._events.ready(info)

    async def _not_ready(self, memory: PoolMemory, worker_id: WorkerId, error: TandemError) -> None:
        """A worker that has served and that Ray cannot reach may be on its way back; any other one has failed."""
        if memory.was_ready(worker_id) and type(error) is ClusterError:
            logger.info("worker %s is not back yet: %s", worker_id, error.message)
            await asyncio.sleep(self._settings.period_s)
            return
        memory.started(worker_id, error=True, now=time.monotonic())
        logger.warning("%s", error.message)
        self._events.failed(worker_id, error)

    async def _remove(self, worker_id: WorkerId, *, drain: bool) -> None:
        """Drains if asked, ends the worker, and takes its record away, should it not have done so itself."""
        try:
            if drain:
                await self._drain(worker_id)
            await self._pools.stop(worker_id, self._settings.stop_timeout_s)
            await self._registry.remove(worker_id)
        except (TandemError, RedisError) as exc:
            logger.warning("worker %s was not taken away, trying again: %s", worker_id, exc)
            await asyncio.sleep(self._settings.period_s)
        else:
            self._events.gone(worker_id)

    async def _drain(self, worker_id: WorkerId) -> None:
        if self.drain_timeout_s <= 0:
            return
        try:
            finished = await self._pools.drain(worker_id, self.drain_timeout_s)
        except TandemError as exc:
            logger.warning("%s; it is ended as it is", exc.message)
            return
        if not finished:
            cut = await self._running_on(worker_id)
            self._events.note(f"worker {worker_id} had not finished after {self.drain_timeout_s:g} s: {cut} cut off")

    async def _running_on(self, worker_id: WorkerId) -> str:
        try:
            loads = [record.load for record in await self._registry.workers() if record.worker_id == worker_id]
        except RedisError:
            loads = []
        return f"{loads[0].num_running + loads[0].num_waiting} sequences" if loads else "its sequences"
