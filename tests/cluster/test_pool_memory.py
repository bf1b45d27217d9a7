"""One state for each worker, out of what Ray, the registry and the controller's own orders say."""

from __future__ import annotations

from cluster.placement import WorkerPlacement
from cluster.pool_memory import FoundWorker, PoolMemory, Registered
from cluster.scaling import Failures, WorkerState
from tandem.types import Role, WorkerId

ID = WorkerId("decode-0")
PLACE = WorkerPlacement(worker_id=ID, role=Role.DECODE, generation=2, cores=(1,))
SERVING = {ID: Registered(is_draining=False, load=3)}


def found(*, has_actor: bool = True, is_placed: bool = True) -> list[FoundWorker]:
    return [FoundWorker(placement=PLACE, has_actor=has_actor, is_placed=is_placed)]


def state_of(
    memory: PoolMemory,
    in_ray: list[FoundWorker],
    records: dict[WorkerId, Registered],
    *,
    leaving: bool = False,
    now: float = 1.0,
) -> WorkerState | None:
    pool = memory.observe(in_ray, records, leaving={ID} if leaving else set(), now=now)
    return pool.workers[0].state if pool.workers else None


def test_an_ordered_worker_is_starting_before_ray_shows_it() -> None:
    memory = PoolMemory(Role.DECODE)
    memory.order(PLACE, 0.0)
    assert state_of(memory, [], {}) is WorkerState.STARTING
    assert memory.placements == [PLACE]


def test_a_worker_is_ready_with_its_record_and_lost_without() -> None:
    memory = PoolMemory(Role.DECODE)
    assert state_of(memory, found(), {}) is WorkerState.STARTING
    assert state_of(memory, found(), SERVING) is WorkerState.READY
    assert state_of(memory, found(), {}) is WorkerState.LOST


def test_a_record_of_a_worker_whose_node_is_gone_counts_for_nothing() -> None:
    memory = PoolMemory(Role.DECODE)
    state_of(memory, found(), SERVING)
    assert state_of(memory, found(is_placed=False), SERVING) is WorkerState.LOST


def test_a_worker_that_another_controller_began_to_drain_is_draining() -> None:
    draining = {ID: Registered(is_draining=True, load=0)}
    assert state_of(PoolMemory(Role.DECODE), found(), draining) is WorkerState.DRAINING


def test_a_worker_that_is_being_taken_away_is_draining_whatever_its_record_says() -> None:
    assert state_of(PoolMemory(Role.DECODE), found(), SERVING, leaving=True) is WorkerState.DRAINING


def test_a_group_without_an_actor_is_a_failed_worker() -> None:
    assert state_of(PoolMemory(Role.DECODE), found(has_actor=False), {}) is WorkerState.FAILED


def test_a_failed_start_counts_and_a_ready_worker_ends_the_count() -> None:
    memory = PoolMemory(Role.DECODE)
    memory.order(PLACE, 0.0)
    memory.started(ID, error=True, now=5.0)
    assert memory.failures == Failures(count=1, last_s=5.0)
    assert state_of(memory, found(), {}) is WorkerState.FAILED
    assert state_of(memory, [], {}) is None
    memory.order(PLACE, 6.0)
    memory.started(ID, error=False, now=7.0)
    assert memory.failures == Failures()
    assert state_of(memory, found(), SERVING) is WorkerState.READY


def test_time_in_a_state_counts_from_its_beginning() -> None:
    memory = PoolMemory(Role.DECODE)
    for now in (1.0, 2.0, 3.0):
        pool = memory.observe(found(), SERVING if now > 1 else {}, leaving=set(), now=now)
    assert pool.workers[0].since_s == 2.0
    assert (pool.workers[0].load, pool.workers[0].generation) == (3, 2)


def test_an_id_whose_record_outlives_its_worker_stays_reserved() -> None:
    pool = PoolMemory(Role.DECODE).observe([], SERVING, leaving=set(), now=1.0)
    assert pool.reserved == {ID}
    assert pool.workers == ()


def test_a_start_that_was_given_up_leaves_no_worker_unless_ray_has_it() -> None:
    memory = PoolMemory(Role.DECODE)
    memory.order(PLACE, 0.0)
    memory.withdraw(ID)
    assert state_of(memory, found(), {}) is WorkerState.STARTING
    assert state_of(memory, [], {}) is None
