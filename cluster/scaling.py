"""What to start, drain and stop so that each pool becomes what is asked for. Pure.

`reconcile` compares the goal of each pool with the workers observed in it and is called again and again: actions repeat
until they show in the observation, so whoever carries them out keeps one operation per worker. Pools never meet here:
each is decided from its own goal and its own workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tandem.types import Role, WorkerId

SURGE = 1
"""Workers that a rolling restart may have beyond the pool's size."""


class WorkerState(StrEnum):
    """STARTING: never ready so far. LOST: was ready, does not answer. FAILED: cannot start, must be removed."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservedWorker:
    """One worker that exists. `since_s` is when it came into its state; `load` is its running and waiting sequences.

    `is_placed` says whether a node has taken it, `waits_for` why none does, where that is known.
    """

    worker_id: WorkerId
    role: Role
    state: WorkerState
    generation: int
    since_s: float
    load: int = 0
    is_placed: bool = True
    waits_for: str = ""

    @property
    def index(self) -> int:
        """The number in its id."""
        return int(self.worker_id.rpartition("-")[2])


@dataclass(frozen=True, kw_only=True, slots=True)
class Failures:
    """Starts of a pool that failed in a row; any worker that becomes ready ends the row."""

    count: int = 0
    last_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservedPool:
    """One pool as it is. `reserved` are ids that must not be given to new workers though nobody runs under them."""

    workers: tuple[ObservedWorker, ...] = ()
    failures: Failures = Failures()
    reserved: frozenset[WorkerId] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """One pool as it should be: `size` workers, none older than `generation`, none whose id is in `drain`."""

    size: int
    generation: int = 0
    drain: frozenset[WorkerId] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Clocks of the decision, in seconds."""

    lost_s: float = 60.0
    """A lost worker that is not back by then is replaced."""
    room_s: float = 10.0
    """A replacement that no node has taken by then finds no room, so what it is to replace must go first."""
    first_backoff_s: float = 1.0
    """Pause after the first failed start; doubled with each further one."""
    longest_backoff_s: float = 60.0

    def backoff_s(self, failures: Failures) -> float:
        """Pause after the last failed start."""
        if failures.count == 0:
            return 0.0
        return min(self.longest_backoff_s, self.first_backoff_s * 2.0 ** min(failures.count - 1, 30))


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Start a worker under a free id."""

    worker_id: WorkerId
    role: Role
    generation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Drain:
    """Let a worker finish what it has, then take it away."""

    worker_id: WorkerId
    role: Role


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """Take a worker away at once: it serves nothing."""

    worker_id: WorkerId
    role: Role


@dataclass(frozen=True, kw_only=True, slots=True)
class Forget:
    """The worker whose drain was asked for is gone: the order is carried out."""

    worker_id: WorkerId
    role: Role


Action = Start | Drain | Stop | Forget


def reconcile(
    goals: Mapping[Role, Goal], observed: Mapping[Role, ObservedPool], now: float, *, limits: Limits
) -> tuple[Action, ...]:
    """Next actions for all pools that have a goal. `now` is on the clock of every `since_s`."""
    return tuple(
        action
        for role, goal in goals.items()
        for action in reconcile_pool(role, goal, observed.get(role, ObservedPool()), now=now, limits=limits)
    )


def reconcile_pool(role: Role, goal: Goal, pool: ObservedPool, *, now: float, limits: Limits) -> tuple[Action, ...]:
    """Next actions for one pool: removals first, then starts, then orders that are carried out."""
    held = _held(goal, pool, now=now, limits=limits)
    workers = [worker for worker in pool.workers if worker != held]
    kept, removals = _remove_condemned(role, goal, workers, now=now, limits=limits)
    kept, retired = _retire(goal, kept)
    removals += [_removal(worker) for worker in retired]
    is_leaving = held is not None or any(isinstance(removal, Drain) for removal in removals)
    starts = _starts(role, goal, pool, kept=kept, is_leaving=is_leaving, now=now, limits=limits)
    return (*removals, *starts, *_forgotten(role, goal, pool))


def _removal(worker: ObservedWorker) -> Action:
    """A lost worker may be away from Redis only and still serve, so it drains too."""
    kind = Stop if worker.state in (WorkerState.STARTING, WorkerState.FAILED) else Drain
    return kind(worker_id=worker.worker_id, role=worker.role)


def _held(goal: Goal, pool: ObservedPool, *, now: float, limits: Limits) -> ObservedWorker | None:
    """The worker to be drained that still has to serve: without it none would, and a replacement may come.

    It is not counted as one of the pool, so the replacement is started. The last to go is the least loaded.
    """
    ready = [worker for worker in pool.workers if worker.state is WorkerState.READY]
    asked = [worker for worker in ready if worker.worker_id in goal.drain]
    if not asked or len(asked) < len(ready) or goal.size == 0 or pool.failures.count:
        return None
    replacements = [w for w in pool.workers if w.state is WorkerState.STARTING and w.worker_id not in goal.drain]
    without_room = [w for w in replacements if not w.is_placed and now - w.since_s >= limits.room_s]
    if without_room and len(without_room) == len(replacements):
        return None
    return min(asked, key=lambda worker: (worker.load, worker.index))


def _remove_condemned(
    role: Role, goal: Goal, workers: Sequence[ObservedWorker], *, now: float, limits: Limits
) -> tuple[list[ObservedWorker], list[Action]]:
    """Splits off the workers that must go whatever the size is."""

    kept: list[ObservedWorker] = []
    removals: list[Action] = []
    for worker in workers:
        if worker.state is WorkerState.LOST and now - worker.since_s >= limits.lost_s:
            removals.append(Stop(worker_id=worker.worker_id, role=role))
        elif worker.state in (WorkerState.DRAINING, WorkerState.FAILED) or worker.worker_id in goal.drain:
            removals.append(_removal(worker))
        else:
            kept.append(worker)
    return kept, removals


def _retire(goal: Goal, kept: list[ObservedWorker]) -> tuple[list[ObservedWorker], list[ObservedWorker]]:
    """Splits off what a restart replaces and what the size has no room for: (who stays, who goes).

    An old worker that serves goes only while `size` others serve; one that does not serve goes at once.
    """
    num_ready = sum(worker.state is WorkerState.READY for worker in kept)
    retired = []
    for worker in sorted(kept, key=_first_to_go):
        is_old = worker.generation < goal.generation
        if is_old and worker.state is not WorkerState.READY:
            retired.append(worker)
        elif is_old and num_ready > goal.size:
            retired.append(worker)
            num_ready -= 1
    rest = sorted((worker for worker in kept if worker not in retired), key=_first_to_go)
    restarting = any(worker.generation < goal.generation for worker in rest)
    excess = max(0, len(rest) - goal.size - (SURGE if restarting else 0))
    return rest[excess:], retired + rest[:excess]


def _first_to_go(worker: ObservedWorker) -> tuple[bool, int, int, int]:
    """Order of removal: not ready, oldest generation, least loaded, highest index."""
    return (worker.state is WorkerState.READY, worker.generation, worker.load, -worker.index)


def _starts(
    role: Role,
    goal: Goal,
    pool: ObservedPool,
    *,
    kept: Sequence[ObservedWorker],
    is_leaving: bool,
    now: float,
    limits: Limits,
) -> list[Action]:
    """A restart goes beyond the size only while nobody else is leaving, so it needs room for one worker more."""
    num_current = sum(worker.generation >= goal.generation for worker in kept)
    surge = SURGE if num_current < len(kept) and not is_leaving else 0
    wanted = min(goal.size - num_current, goal.size + surge - len(kept))
    if pool.failures.count:  # one at a time until one works
        is_trying = any(worker.state is WorkerState.STARTING for worker in kept)
        may_try = now - pool.failures.last_s >= limits.backoff_s(pool.failures) and not is_trying
        wanted = min(wanted, int(may_try))
    used = {worker.worker_id for worker in pool.workers} | pool.reserved | goal.drain
    return [
        Start(worker_id=worker_id, role=role, generation=goal.generation)
        for worker_id in _free_ids(role, used, max(0, wanted))
    ]


def _free_ids(role: Role, used: set[WorkerId], count: int) -> list[WorkerId]:
    candidates = (WorkerId(f"{role}-{index}") for index in range(len(used) + count))
    return [worker_id for worker_id in candidates if worker_id not in used][:count]


def _forgotten(role: Role, goal: Goal, pool: ObservedPool) -> list[Action]:
    present = {worker.worker_id for worker in pool.workers}
    return [Forget(worker_id=worker_id, role=role) for worker_id in sorted(goal.drain - present)]
