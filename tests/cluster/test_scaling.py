"""The decision what to start, drain and stop: examples, and a state machine of two pools whose workers misbehave."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cluster.scaling import (
    SURGE,
    Action,
    Drain,
    Failures,
    Forget,
    Goal,
    Limits,
    ObservedPool,
    ObservedWorker,
    Start,
    Stop,
    WorkerState,
    reconcile,
    reconcile_pool,
)
from tandem.types import Role, WorkerId

LIMITS = Limits(lost_s=10.0, first_backoff_s=1.0, longest_backoff_s=8.0)
READY, STARTING, LOST = WorkerState.READY, WorkerState.STARTING, WorkerState.LOST
DRAINING, FAILED = WorkerState.DRAINING, WorkerState.FAILED


def make_worker(
    index: int,
    state: WorkerState = READY,
    *,
    generation: int = 0,
    load: int = 0,
    since_s: float = 0.0,
    is_placed: bool = True,
) -> ObservedWorker:
    return ObservedWorker(
        worker_id=WorkerId(f"decode-{index}"),
        role=Role.DECODE,
        state=state,
        generation=generation,
        since_s=since_s,
        load=load,
        is_placed=is_placed,
    )


def decide(goal: Goal, *workers: ObservedWorker, now: float = 1.0, failures: Failures = Failures()) -> list[Action]:  # noqa: B008
    pool = ObservedPool(workers=workers, failures=failures)
    return list(reconcile_pool(Role.DECODE, goal, pool, now=now, limits=LIMITS))


def start(index: int, generation: int = 0) -> Start:
    return Start(worker_id=WorkerId(f"decode-{index}"), role=Role.DECODE, generation=generation)


def drain(index: int) -> Drain:
    return Drain(worker_id=WorkerId(f"decode-{index}"), role=Role.DECODE)


def stop(index: int) -> Stop:
    return Stop(worker_id=WorkerId(f"decode-{index}"), role=Role.DECODE)


def test_an_empty_pool_grows_to_its_size() -> None:
    assert decide(Goal(size=3)) == [start(0), start(1), start(2)]


def test_a_pool_at_its_size_is_left_alone() -> None:
    assert decide(Goal(size=2), make_worker(0), make_worker(1, STARTING)) == []


def test_new_workers_take_the_smallest_ids_that_nobody_has() -> None:
    assert decide(Goal(size=4), make_worker(1), make_worker(3)) == [start(0), start(2)]


def test_an_id_with_a_record_but_no_worker_is_not_used() -> None:
    pool = ObservedPool(reserved=frozenset({WorkerId("decode-0")}))
    assert list(reconcile_pool(Role.DECODE, Goal(size=1), pool, now=0.0, limits=LIMITS)) == [start(1)]


def test_a_pool_grows_while_others_still_drain() -> None:
    assert decide(Goal(size=2), make_worker(0, DRAINING), make_worker(1)) == [drain(0), start(2)]


def test_size_zero_drains_everything() -> None:
    assert decide(Goal(size=0), make_worker(0), make_worker(1, STARTING)) == [stop(1), drain(0)]


def test_shrinking_takes_what_is_not_ready_first() -> None:
    assert decide(Goal(size=1), make_worker(0), make_worker(1), make_worker(2, STARTING)) == [stop(2), drain(1)]


def test_shrinking_takes_the_least_loaded_and_of_equals_the_highest_index() -> None:
    workers = [make_worker(0, load=5), make_worker(1, load=2), make_worker(2, load=2)]
    assert decide(Goal(size=2), *workers) == [drain(2)]


def test_a_lost_worker_that_is_too_many_drains_because_it_may_still_serve() -> None:
    assert decide(Goal(size=1), make_worker(0), make_worker(1, LOST)) == [drain(1)]


def test_a_lost_worker_has_time_to_come_back() -> None:
    assert decide(Goal(size=1), make_worker(0, LOST), now=9.0) == []


def test_a_worker_that_stays_lost_is_replaced() -> None:
    assert decide(Goal(size=1), make_worker(0, LOST), now=10.0) == [stop(0), start(1)]


def test_a_drained_worker_is_replaced_at_once() -> None:
    goal = Goal(size=2, drain=frozenset({WorkerId("decode-0")}))
    assert decide(goal, make_worker(0), make_worker(1)) == [drain(0), start(2)]


ORDERED_OUT = Goal(size=1, drain=frozenset({WorkerId("decode-0")}))


def test_the_last_worker_that_serves_is_drained_only_when_its_replacement_serves() -> None:
    assert decide(ORDERED_OUT, make_worker(0)) == [start(1)]
    assert decide(ORDERED_OUT, make_worker(0), make_worker(1, STARTING), now=500.0) == []
    assert decide(ORDERED_OUT, make_worker(0), make_worker(1)) == [drain(0)]


def test_a_drain_of_all_workers_keeps_one_until_a_replacement_serves() -> None:
    goal = Goal(size=2, drain=frozenset({WorkerId("decode-0"), WorkerId("decode-1")}))
    busy, idle = make_worker(0, load=3), make_worker(1)
    assert decide(goal, busy, idle) == [drain(0), start(2), start(3)]


def test_the_last_worker_goes_first_when_there_is_no_room_for_its_replacement() -> None:
    waiting = make_worker(1, STARTING, is_placed=False)
    assert decide(ORDERED_OUT, make_worker(0), waiting, now=9.0) == []
    assert decide(ORDERED_OUT, make_worker(0), waiting, now=10.0) == [drain(0)]


def test_the_last_worker_goes_first_when_replacements_cannot_start() -> None:
    assert decide(ORDERED_OUT, make_worker(0), failures=Failures(count=1, last_s=0.5)) == [drain(0)]


def test_the_last_worker_of_a_pool_of_size_zero_is_drained_at_once() -> None:
    assert decide(Goal(size=0, drain=frozenset({WorkerId("decode-0")})), make_worker(0)) == [drain(0)]


def test_an_order_to_drain_somebody_who_is_gone_is_forgotten_before_the_id_is_used_again() -> None:
    goal = Goal(size=1, drain=frozenset({WorkerId("decode-0")}))
    assert decide(goal) == [start(1), Forget(worker_id=WorkerId("decode-0"), role=Role.DECODE)]


def test_a_restart_first_starts_one_more() -> None:
    assert decide(Goal(size=2, generation=1), make_worker(0), make_worker(1)) == [start(2, 1)]


def test_a_restart_drains_an_old_worker_only_when_its_successor_is_ready() -> None:
    old = [make_worker(0), make_worker(1)]
    assert decide(Goal(size=2, generation=1), *old, make_worker(2, STARTING, generation=1)) == []
    assert decide(Goal(size=2, generation=1), *old, make_worker(2, generation=1)) == [drain(1)]


def test_a_restart_goes_on_when_the_old_worker_has_left() -> None:
    kept = [make_worker(0), make_worker(2, generation=1)]
    assert decide(Goal(size=2, generation=1), *kept, make_worker(1, DRAINING)) == [drain(1)]
    assert decide(Goal(size=2, generation=1), *kept) == [start(1, 1)]


def test_a_restart_drops_old_workers_that_never_served() -> None:
    assert decide(Goal(size=1, generation=1), make_worker(0, STARTING)) == [stop(0), start(1, 1)]


def test_shrinking_in_the_middle_of_a_restart_keeps_the_new_ones() -> None:
    workers = [make_worker(0), make_worker(1), make_worker(2, generation=1), make_worker(3, generation=1)]
    assert decide(Goal(size=2, generation=1), *workers) == [drain(1), drain(0)]


def test_failed_starts_are_removed_and_tried_again_after_a_pause_that_doubles() -> None:
    failures = [Failures(count=count, last_s=0.0) for count in range(1, 7)]
    assert [LIMITS.backoff_s(failure) for failure in failures] == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    assert decide(Goal(size=1), make_worker(0, FAILED), now=1.5, failures=failures[1]) == [stop(0)]
    assert decide(Goal(size=1), now=2.0, failures=failures[1]) == [start(0)]


def test_after_a_failure_one_start_at_a_time_is_tried() -> None:
    failures = Failures(count=1, last_s=0.0)
    assert decide(Goal(size=3), now=5.0, failures=failures) == [start(0)]
    assert decide(Goal(size=3), make_worker(0, STARTING), now=5.0, failures=failures) == []


def test_no_number_of_failures_overflows() -> None:
    assert LIMITS.backoff_s(Failures(count=10_000, last_s=0.0)) == 8.0


class TwoPools(RuleBasedStateMachine):
    """Carries out what `reconcile` says, in any order and speed, while workers die, fail, and sizes change."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.goals = dict.fromkeys(Role, Goal(size=1))
        self.workers: dict[WorkerId, ObservedWorker] = {}
        self.failures = dict.fromkeys(Role, Failures())

    def pool(self, role: Role) -> ObservedPool:
        workers = tuple(worker for worker in self.workers.values() if worker.role is role)
        return ObservedPool(workers=workers, failures=self.failures[role])

    def of(self, role: Role, *states: WorkerState) -> list[ObservedWorker]:
        return [w for w in self.workers.values() if w.role is role and (not states or w.state in states)]

    def enter(self, worker: ObservedWorker, state: WorkerState) -> None:
        self.workers[worker.worker_id] = replace(worker, state=state, since_s=self.now)

    @initialize(data=st.data())
    def any_state(self, data: st.DataObject) -> None:
        for role in Role:
            for index in sorted(data.draw(st.sets(st.integers(0, 6), max_size=5))):
                worker_id = WorkerId(f"{role}-{index}")
                self.workers[worker_id] = ObservedWorker(
                    worker_id=worker_id,
                    role=role,
                    state=data.draw(st.sampled_from(WorkerState)),
                    generation=data.draw(st.integers(0, 2)),
                    since_s=0.0,
                    load=data.draw(st.integers(0, 3)),
                )
            self.goals[role] = Goal(size=data.draw(st.integers(0, 4)), generation=data.draw(st.integers(0, 2)))

    @rule()
    def act(self) -> None:
        before = {role: self.census(role) for role in Role}
        for action in reconcile(self.goals, {role: self.pool(role) for role in Role}, self.now, limits=LIMITS):
            assert action.worker_id.startswith(f"{action.role}-")
            self.carry_out(action)
        for role in Role:
            self.check_turn(role, *before[role])

    def census(self, role: Role) -> tuple[int, int, int]:
        """Workers that stay, of them ready, and those whose departure is ordered by hand."""
        staying = self.of(role, READY, STARTING, LOST)
        ordered = sum(w.worker_id in self.goals[role].drain for w in staying)
        return len(staying), len(self.of(role, READY)), ordered

    def check_turn(self, role: Role, num_before: int, ready_before: int, num_ordered: int) -> None:
        num_after, ready_after, _ = self.census(role)
        size = self.goals[role].size
        assert num_after <= max(size + SURGE, 0)
        assert ready_after >= min(size, ready_before) - num_ordered
        if size and not self.failures[role].count:
            assert ready_after >= min(1, ready_before), "the last one that serves was taken away"
        if num_after > num_before:
            restarting = any(w.generation < self.goals[role].generation for w in self.of(role, READY, STARTING, LOST))
            assert num_after <= size + (SURGE if restarting or num_ordered else 0)

    def carry_out(self, action: Action) -> None:
        match action:
            case Start(worker_id=worker_id, role=role, generation=generation):
                assert worker_id not in self.workers
                assert worker_id not in self.goals[role].drain
                assert generation == self.goals[role].generation
                self.workers[worker_id] = ObservedWorker(
                    worker_id=worker_id, role=role, state=STARTING, generation=generation, since_s=self.now
                )
            case Drain(worker_id=worker_id):
                assert self.workers[worker_id].state not in (STARTING, FAILED)
                self.enter(self.workers[worker_id], DRAINING)
            case Stop(worker_id=worker_id):
                assert self.workers[worker_id].state is not READY
                del self.workers[worker_id]
            case Forget(worker_id=worker_id, role=role):
                assert worker_id not in self.workers
                goal = self.goals[role]
                self.goals[role] = replace(goal, drain=goal.drain - {worker_id})

    @rule(seconds=st.sampled_from([0.1, 1.0, 9.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(role=st.sampled_from(Role), size=st.integers(0, 4))
    def scale(self, role: Role, size: int) -> None:
        self.goals[role] = replace(self.goals[role], size=size)

    @rule(role=st.sampled_from(Role))
    def restart(self, role: Role) -> None:
        self.goals[role] = replace(self.goals[role], generation=self.goals[role].generation + 1)

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def drain_one(self, data: st.DataObject) -> None:
        worker = self.workers[data.draw(st.sampled_from(sorted(self.workers)))]
        goal = self.goals[worker.role]
        self.goals[worker.role] = replace(goal, drain=goal.drain | {worker.worker_id})

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), fails=st.booleans())
    def something_happens(self, data: st.DataObject, fails: bool) -> None:
        worker = self.workers[data.draw(st.sampled_from(sorted(self.workers)))]
        self.advance(worker, fails=fails)

    def advance(self, worker: ObservedWorker, *, fails: bool) -> None:
        """One step of a worker's life."""
        if worker.state is DRAINING:
            del self.workers[worker.worker_id]
        elif worker.state is STARTING and fails:
            self.failures[worker.role] = Failures(count=self.failures[worker.role].count + 1, last_s=self.now)
            self.enter(worker, FAILED)
        elif worker.state in (STARTING, LOST):
            self.failures[worker.role] = Failures()
            self.enter(worker, READY)
        elif worker.state is READY and fails:
            self.enter(worker, LOST)

    @invariant()
    def left_alone_it_converges(self) -> None:
        twin = TwoPools()
        twin.now, twin.goals, twin.failures = self.now, dict(self.goals), dict(self.failures)
        twin.workers = dict(self.workers)
        for _ in range(60):
            twin.act()
            if twin.is_at_its_goal():
                return
            twin.now += LIMITS.longest_backoff_s
            for worker in list(twin.workers.values()):
                twin.advance(worker, fails=False)
        raise AssertionError(f"did not converge: {twin.goals} {twin.workers}")

    def is_at_its_goal(self) -> bool:
        return all(
            len(self.of(role)) == len(self.of(role, READY)) == goal.size
            and all(worker.generation >= goal.generation for worker in self.of(role))
            and not goal.drain
            for role, goal in self.goals.items()
        )


TestTwoPools = TwoPools.TestCase
TestTwoPools.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_a_change_of_one_pool_never_acts_on_the_other() -> None:
    prefill = ObservedWorker(
        worker_id=WorkerId("prefill-0"), role=Role.PREFILL, state=READY, generation=0, since_s=0.0
    )
    observed = {Role.PREFILL: ObservedPool(workers=(prefill,)), Role.DECODE: ObservedPool()}
    for size in range(5):
        goals = {Role.PREFILL: Goal(size=1), Role.DECODE: Goal(size=size, generation=3)}
        actions = reconcile(goals, observed, 0.0, limits=LIMITS)
        assert {action.role for action in actions} <= {Role.DECODE}
