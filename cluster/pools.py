"""The two pools of worker actors on Ray: start, watch, drain, stop.

Ray owns the workers' life: each is an actor in a placement group of its own that Ray starts again when its process
dies. Tokens and KV never pass through here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.events import WorkerInfo
from cluster.placement import WorkerPlacement, total_resources
from cluster.ray_local import LocalRay
from cluster.ray_worker import RayWorker
from tandem.errors import ClusterError, TandemError
from tandem.types import Role

WORKER_CLASSES: Mapping[Role, str] = {
    Role.PREFILL: "prefill_pool.actor:PrefillActor",
    Role.DECODE: "decode_pool.actor:DecodeActor",
}
_CONCURRENT_CALLS = 4
"""`ready` blocks in the actor; ping, drain and stop must pass it."""
_PING_EVERY_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Worker:
    placement: WorkerPlacement
    group: Any
    actor: Any


def _cause(exc: BaseException, worker_id: str) -> TandemError:
    """The worker's own error out of Ray's wrapping, with the worker's name in front."""
    inner = getattr(exc, "cause", None) or exc
    lines = str(inner).strip().splitlines() or [type(inner).__name__]
    text = inner.message if isinstance(inner, TandemError) else f"{type(inner).__name__}: {lines[-1].strip()}"
    kind = type(inner) if isinstance(inner, TandemError) and not hasattr(inner, "cause") else ClusterError
    return kind(f"worker {worker_id} could not be started: {text}")


class RayPools:
    """All workers of both pools. `settings_of` gives each its constructor argument."""

    def __init__(
        self,
        ray: LocalRay,
        placements: Sequence[WorkerPlacement],
        *,
        settings_of: Callable[[WorkerPlacement], dict[str, Any]],
        classes: Mapping[Role, str] = WORKER_CLASSES,
    ) -> None:
        self._ray = ray
        self._placements = tuple(placements)
        self._settings_of = settings_of
        self._classes = classes
        self._workers: list[_Worker] = []
        self._pids: dict[str, int] = {}

    async def start_ray(self) -> None:
        """Starts Ray with room for exactly these workers. Raises ClusterError."""
        await self._ray.start(total_resources(self._placements))

    async def create(self) -> None:
        """Creates placement groups and actors; they start side by side."""
        self._workers = await self._ray.call(lambda: [self._create(place) for place in self._placements])

    def _create(self, place: WorkerPlacement) -> _Worker:
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = placement_group([place.bundle], strategy="STRICT_PACK", name=place.worker_id)
        options = {
            "num_cpus": place.num_cpus,
            "resources": {name: amount for name, amount in place.bundle.items() if name != "CPU"},
            "max_restarts": -1,
            "max_task_retries": 0,
            "max_concurrency": _CONCURRENT_CALLS,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=0
            ),
        }
        actor = ray.remote(RayWorker).options(**options).remote(self._classes[place.role], self._settings_of(place))
        return _Worker(placement=place, group=group, actor=actor)

    async def wait_ready(self, on_ready: Callable[[WorkerInfo], None]) -> list[WorkerInfo]:
        """Waits for all workers; cancels the other waits when one fails."""

        async def one(worker: _Worker) -> WorkerInfo:
            info = await self._ready(worker)
            on_ready(info)
            return info

        tasks = [asyncio.create_task(one(worker)) for worker in self._workers]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _ready(self, worker: _Worker) -> WorkerInfo:
        from ray.exceptions import RayError

        try:
            info = WorkerInfo.from_mapping(await self._get(worker.actor.ready))
            self._pids[worker.placement.worker_id] = info.pid
            return info
        except (RayError, TandemError) as exc:
            raise _cause(exc, worker.placement.worker_id) from exc

    async def _get(self, method: Any, *args: Any) -> Any:
        return await asyncio.wrap_future(await self._ray.call(lambda: method.remote(*args).future()))

    async def watch(self, note: Callable[[str], None]) -> None:
        """Tells of workers that die and come back, until cancelled. Ray restarts them; nothing is decided here."""
        await asyncio.gather(*(self._watch(worker, note) for worker in self._workers))

    async def _watch(self, worker: _Worker, note: Callable[[str], None]) -> None:
        from ray.exceptions import RayError

        name = worker.placement.worker_id
        lost = False
        while True:
            try:
                if await self._get(worker.actor.ping) != self._pids[name]:
                    if not lost:
                        note(f"worker {name} died; Ray has started it again")
                    note(f"worker {name} is back (process {(await self._ready(worker)).pid})")
                lost = False
            except (RayError, TandemError) as exc:
                if not lost:
                    note(f"worker {name} died; Ray is starting it again ({type(exc).__name__})")
                lost = True
            await asyncio.sleep(_PING_EVERY_S)

    async def drain(self, timeout_s: float) -> bool:
        """Drains all workers at once; True when everything that ran has finished."""
        from ray.exceptions import RayError

        calls = [self._get(worker.actor.drain, timeout_s) for worker in self._workers]
        try:
            async with asyncio.timeout(timeout_s + 5.0):
                results = await asyncio.gather(*calls, return_exceptions=True)
        except TimeoutError:
            return False
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, RayError | TandemError):
                raise result
        return all(result is True for result in results)

    async def stop(self, *, timeout_s: float = 10.0) -> list[str]:
        """Stops and removes all workers, then Ray. Returns what had to be killed. Idempotent."""
        workers, self._workers = self._workers, []
        try:
            if workers:
                await self._stop_workers(workers, timeout_s)
        finally:
            killed = await self._ray.stop(timeout_s=timeout_s)
        return killed

    async def _stop_workers(self, workers: list[_Worker], timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(self._get(worker.actor.stop) for worker in workers), return_exceptions=True)
        except TimeoutError:
            pass  # killed next
        await self._ray.call(lambda: _remove(workers))


def _remove(workers: list[_Worker]) -> None:
    import ray
    from ray.util.placement_group import remove_placement_group

    for worker in workers:
        ray.kill(worker.actor, no_restart=True)
        remove_placement_group(worker.group)
