"""What the controller knows of one pool: Ray's word, the registry's and its own orders, as one state per worker. Pure.

Ray says which workers exist, the registry which of them serve; orders under way are known before either shows them.
A worker that was ready and has no record is lost; one that never was is starting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from cluster.placement import WorkerPlacement
from cluster.scaling import Failures, ObservedPool, ObservedWorker, WorkerState
from tandem.types import Role, WorkerId


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundWorker:
    """A worker in Ray. Without an actor it is a rest of one; not placed: its node is gone, or not there yet.

    `waits_for` says why no node has room for it; empty where it is placed, or will be at once.
    """

    placement: WorkerPlacement
    has_actor: bool
    is_placed: bool
    waits_for: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Registered:
    """A worker's record in the registry. `load` is its running and waiting sequences."""

    is_draining: bool
    load: int


@dataclass(kw_only=True, slots=True)
class _Known:
    placement: WorkerPlacement
    state: WorkerState
    since_s: float
    is_ordered: bool = False
    """Its start is under way, so Ray need not know it yet."""
    was_ready: bool = False
    has_failed: bool = False


class PoolMemory:
    """The workers of one role. Times are on one monotonic clock."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.failures = Failures()
        self._known: dict[WorkerId, _Known] = {}

    @property
    def placements(self) -> list[WorkerPlacement]:
        """Where the workers are, those that start or leave among them."""
        return [known.placement for known in self._known.values()]

    def was_ready(self, worker_id: WorkerId) -> bool:
        """Whether the worker has ever served."""
        return worker_id in self._known and self._known[worker_id].was_ready

    def order(self, placement: WorkerPlacement, now: float) -> None:
        """A start is under way."""
        self._known[placement.worker_id] = _Known(
            placement=placement, state=WorkerState.STARTING, since_s=now, is_ordered=True
        )

    def started(self, worker_id: WorkerId, *, error: bool, now: float) -> None:
        """A start, or the wait for a worker that was not there, is over."""
        known = self._known.get(worker_id)
        if known is None:
            return
        known.is_ordered = False
        if error:
            known.has_failed = True
            self.failures = Failures(count=self.failures.count + 1, last_s=now)
        else:
            known.was_ready = True
            self.failures = Failures()

    def withdraw(self, worker_id: WorkerId) -> None:
        """A start was given up before its end."""
        if worker_id in self._known:
            self._known[worker_id].is_ordered = False

    def observe(
        self,
        found: Sequence[FoundWorker],
        records: Mapping[WorkerId, Registered],
        *,
        leaving: AbstractSet[WorkerId],
        now: float,
    ) -> ObservedPool:
        """One state for each worker. `found` and `records` are this pool's; `leaving` are being taken away now."""
        in_ray = {worker.placement.worker_id: worker for worker in found}
        for worker_id, worker in in_ray.items():
            if worker_id not in self._known:
                self._known[worker_id] = _Known(
                    placement=worker.placement, state=WorkerState.STARTING, since_s=now
                )
        for worker_id in [w for w, known in self._known.items() if w not in in_ray and not known.is_ordered]:
            del self._known[worker_id]
        for worker_id, known in self._known.items():
            state = _state(known, in_ray.get(worker_id), records.get(worker_id), is_leaving=worker_id in leaving)
            self._enter(known, state, now)
        return ObservedPool(
            workers=tuple(self._observed(known, in_ray, records) for known in self._known.values()),
            failures=self.failures,
            reserved=frozenset(records.keys() - self._known.keys()),
        )

    def _enter(self, known: _Known, state: WorkerState, now: float) -> None:
        if state is known.state:
            return
        known.state, known.since_s = state, now
        if state is WorkerState.READY:
            known.was_ready = True
            self.failures = Failures()

    def _observed(
        self, known: _Known, in_ray: Mapping[WorkerId, FoundWorker], records: Mapping[WorkerId, Registered]
    ) -> ObservedWorker:
        found = in_ray.get(known.placement.worker_id)
        record = records.get(known.placement.worker_id)
        return ObservedWorker(
            worker_id=known.placement.worker_id,
            role=self.role,
            state=known.state,
            generation=known.placement.generation,
            since_s=known.since_s,
            load=record.load if record is not None else 0,
            is_placed=found is not None and found.is_placed,
            waits_for="" if found is None else found.waits_for,
        )


def _state(
    known: _Known, found: FoundWorker | None, record: Registered | None, *, is_leaving: bool
) -> WorkerState:
    if is_leaving:
        return WorkerState.DRAINING
    if known.has_failed:
        return WorkerState.FAILED
    if found is not None and not found.has_actor and not known.is_ordered:
        return WorkerState.FAILED
    if record is not None and record.is_draining:
        return WorkerState.DRAINING
    if record is not None and found is not None and found.is_placed:
        return WorkerState.READY
    return WorkerState.LOST if known.was_ready else WorkerState.STARTING
