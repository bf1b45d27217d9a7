"""Makes the pools what they are asked to be: reads the desired state, observes, decides with `scaling.py`, acts.

The only part that starts or stops workers. One controller acts at a time, the one that holds the lease; its death
disturbs no worker, and its successor finds them all. What fails is logged and tried again with the next turn.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from redis.exceptions import RedisError

from cluster.controller_settings import ControllerEvents, ControllerSettings
from cluster.desired import DesiredView
from cluster.losses import Losses
from cluster.operations import Operations
from cluster.placement import Selector, WorkerPlacement, choose_cores
from cluster.pool_memory import FoundWorker, Registered
from cluster.pools import Pools
from cluster.scaling import (
    Action,
    Drain,
    Forget,
    Goal,
    ObservedPool,
    ObservedWorker,
    Start,
    Stop,
    WorkerState,
    reconcile,
)
from tandem.errors import TandemError
from tandem.observability.controller_metrics import ControllerMetrics
from tandem.pool_state import PoolState, SeenWorker
from tandem.registry import Registry, WorkerRecord
from tandem.tasks import cancel_all
from tandem.types import Role, WorkerId

logger = logging.getLogger(__name__)


class Controller:
    """Event loop only: `run` until `stop`. `holder` names this controller, and its successors, in the lease."""

    def __init__(
        self,
        state: PoolState,
        registry: Registry,
        *,
        pools: Pools,
        settings: ControllerSettings,
        holder: str,
        events: ControllerEvents | None = None,
    ) -> None:
        self.metrics = ControllerMetrics()
        self._state = state
        self._registry = registry
        self._pools = pools
        self._settings = settings
        self._holder = holder
        self._events = events or ControllerEvents()
        self._wake = asyncio.Event()
        self._desired = DesiredView(state, settings.sizes)
        self._operations = Operations(
            pools,
            registry,
            settings=settings,
            events=self._events,
            metrics=self.metrics,
            on_over=self._wake.set,
        )
        self._records: list[WorkerRecord] = []
        self._losses = Losses(self._events.note)
        self._waiting: dict[WorkerId, str] = {}
        """Workers that no node has room for, and why."""
        self._acting = False
        self._settle_until_s = 0.0
        self._ending = False
        self._stopping = False
        self._is_empty = asyncio.Event()

    @property
    def is_acting(self) -> bool:
        """Whether this controller holds the lease and the cluster is not being ended."""
        return self._acting and not self._ending

    @property
    def has_ended_workers(self) -> bool:
        """Whether the cluster is over: `end_workers` has taken the last one away."""
        return self._is_empty.is_set()

    # --- life

    async def run(self) -> None:
        """Works until `stop`. Workers stay when it ends."""
        followers = [
            asyncio.create_task(self._follow(self._state.changes)),
            asyncio.create_task(self._follow(self._registry.changes)),
            asyncio.create_task(self._keep_lease()),
        ]
        try:
            while not self._stopping:
                await self._turn()
                await self._pause()
        finally:
            await cancel_all(followers)
            await self._operations.close()
            await self._give_lease_back()

    def stop(self) -> None:
        """Lets `run` return after the turn it is in."""
        self._stopping = True
        self._wake.set()

    async def end_workers(self, drain_timeout_s: float) -> None:
        """Drains and ends all workers, forgets the desired state and lets `run` return: the cluster is over.

        Only while `run` runs. Does nothing in a controller that does not act.
        """
        if not self._acting:
            return
        self._ending = True
        self._operations.drain_timeout_s = drain_timeout_s
        self._wake.set()
        await self._is_empty.wait()
        self.stop()
        await self._desired.clear()

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(self._settings.period_s):
                await self._wake.wait()
        except TimeoutError:
            return
        self._wake.clear()

    async def _follow(self, changes: Callable[[], AsyncIterator[None]]) -> None:
        while True:
            try:
                async for _ in changes():
                    self._wake.set()
            except RedisError:
                await asyncio.sleep(self._settings.period_s)  # the turns report it; this is the pace of reconnecting

    # --- the lease

    async def _keep_lease(self) -> None:
        while True:
            try:
                self._lead(await self._state.hold_lease(self._holder, ttl_s=self._settings.lease_s))
            except RedisError as exc:  # nobody can take it while Redis is away, so who acts goes on
                logger.warning("the lease was not renewed, Redis is away: %s", exc)
                self._unsettle()
            await asyncio.sleep(self._settings.lease_s / 5)

    def _lead(self, acting: bool) -> None:
        if acting == self._acting:
            return
        self._acting = acting
        self.metrics.lease(acting)
        logger.info("controller %s %s", self._holder, "acts" if acting else "waits for the lease")
        self._unsettle()
        self._wake.set()

    async def _give_lease_back(self) -> None:
        try:
            await self._state.release_lease(self._holder)
        except RedisError as exc:
            logger.warning("the lease runs out by itself, Redis is away: %s", exc)

    def _unsettle(self) -> None:
        """From now on a missing record means nothing for a while."""
        self._settle_until_s = time.monotonic() + self._settings.settle_s

    # --- one turn

    async def _turn(self) -> None:
        if not self._acting or self._is_empty.is_set():
            return
        started_s = time.monotonic()
        try:
            await self._reconcile()
        except TandemError as exc:
            self.metrics.failed()
            logger.warning("the pools could not be looked after, trying again: %s", exc.message)
        self.metrics.reconciled(time.monotonic() - started_s)

    async def _reconcile(self) -> None:
        if not await self._desired.refresh():
            self._unsettle()
        leaving = self._operations.leaving
        found = await self._pools.find()
        records = await self._read_records()
        if not self._is_settled(found, records):
            return
        goals = {role: Goal(size=0) for role in Role} if self._ending else self._desired.goals()
        observed = self._observe(found, records)
        for action in reconcile(goals, observed, time.monotonic(), limits=self._settings.limits):
            await self._carry_out(action)
        workers = [worker for pool in observed.values() for worker in pool.workers]
        for worker in workers:
            if worker.state in (WorkerState.STARTING, WorkerState.LOST):
                self._operations.wait(worker.role, worker.worker_id)
        lost = [worker.worker_id for worker in workers if worker.state is WorkerState.LOST]
        self._losses.missed(set(lost) - leaving)  # what was taken away meanwhile looks like it
        self._note_waiting(workers)
        await self._show(workers)
        self._report(goals, observed)

    def _note_waiting(self, workers: Sequence[ObservedWorker]) -> None:
        waiting = {worker.worker_id: worker.waits_for for worker in workers if worker.waits_for}
        for worker_id, why in waiting.items():
            if self._waiting.get(worker_id) != why:
                self._events.note(f"worker {worker_id} waits for a node with room: {why}")
        self._waiting = waiting

    async def _show(self, workers: Sequence[ObservedWorker]) -> None:
        """Routers tell of workers that are not registered, and wait for them."""
        seen = [
            SeenWorker(
                worker_id=w.worker_id,
                role=w.role,
                state=w.state.value,
                generation=w.generation,
                waits_for=w.waits_for,
            )
            for w in workers
        ]
        try:
            await self._state.show(seen)
        except RedisError as exc:
            logger.warning("what the controller sees was not written, Redis is away: %s", exc)

    async def _read_records(self) -> list[WorkerRecord]:
        try:
            self._records = await self._registry.workers()
        except RedisError as exc:
            logger.warning("Redis is away, keeping the last known workers: %s", exc)
            self._unsettle()
        self._losses.registered(self._records)
        return self._records

    def _is_settled(self, found: Sequence[FoundWorker], records: Sequence[WorkerRecord]) -> bool:
        """Whether a missing record means something: not right after Redis was away, nor after taking over."""
        present = {record.worker_id for record in records}
        silent = [
            worker.placement.worker_id
            for worker in found
            if worker.placement.worker_id not in present and self._operations.kind(worker.placement.worker_id) is None
        ]
        return self._ending or not silent or time.monotonic() >= self._settle_until_s

    def _observe(self, found: Sequence[FoundWorker], records: Sequence[WorkerRecord]) -> dict[Role, ObservedPool]:
        return {
            role: memory.observe(
                [worker for worker in found if worker.placement.role is role],
                {record.worker_id: _registered(record) for record in records if record.role is role},
                leaving=self._operations.leaving,
                now=time.monotonic(),
            )
            for role, memory in self._operations.memories.items()
        }

    def _report(self, goals: Mapping[Role, Goal], observed: Mapping[Role, ObservedPool]) -> None:
        reached = not any(self._operations.kind(w.worker_id) for pool in observed.values() for w in pool.workers)
        for role, goal in goals.items():
            states = [worker.state for worker in observed[role].workers]
            num_ready, num_draining = states.count(WorkerState.READY), states.count(WorkerState.DRAINING)
            reached = reached and num_ready >= goal.size
            self.metrics.pool(
                role,
                desired=goal.size,
                ready=num_ready,
                draining=num_draining,
                unplaced=sum(bool(worker.waits_for) for worker in observed[role].workers),
                generation=goal.generation,
            )
        if reached:
            self._events.reached()
        if self._ending and self._operations.is_idle and not any(pool.workers for pool in observed.values()):
            self._is_empty.set()

    # --- actions

    async def _carry_out(self, action: Action) -> None:
        match action:
            case Start():
                self._operations.start(self._place(action))
            case Drain(worker_id=worker_id):
                await self._operations.take_away(worker_id, drain=True)
            case Stop(worker_id=worker_id):
                await self._operations.take_away(worker_id, drain=False)
            case Forget(worker_id=worker_id):
                self.metrics.action("forget")
                await self._desired.forget_drain(worker_id)

    def _place(self, start: Start) -> WorkerPlacement:
        others = [place for memory in self._operations.memories.values() for place in memory.placements]
        return WorkerPlacement(
            worker_id=start.worker_id,
            role=start.role,
            generation=start.generation,
            cores=choose_cores(start.role, self._settings.cores, others, sizes=self._desired.sizes),
            num_ranks=self._settings.num_ranks.get(start.role, 1),
            selector=self._settings.selectors.get(start.role, Selector()),
        )


def _registered(record: WorkerRecord) -> Registered:
    load = record.load.num_running + record.load.num_waiting
    return Registered(is_draining=record.state == "draining", load=load)
