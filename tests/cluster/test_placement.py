"""Placement: who gets which cores."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.placement import plan_placement, total_resources
from tandem.types import Role


def cores_of(cores: int, prefill: int, decode: int) -> list[tuple[int, ...]]:
    return [worker.cores for worker in plan_placement(range(cores), num_prefill=prefill, num_decode=decode)]


@pytest.mark.parametrize(
    ("cores", "prefill", "decode", "expected"),
    [
        (2, 1, 1, [(0,), (1,)]),
        (2, 2, 2, [(0,), (0,), (1,), (1,)]),
        (8, 1, 1, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (5, 1, 1, [(0, 1, 2), (3, 4)]),
        (3, 2, 2, [(0,), (1,), (2,), (2,)]),
        (1, 1, 1, [(), ()]),
        (4, 2, 1, [(0, 1), (2,), (3,)]),
    ],
)
def test_cores_are_spread_evenly_prefill_first(
    cores: int, prefill: int, decode: int, expected: list[tuple[int, ...]]
) -> None:
    assert cores_of(cores, prefill, decode) == expected


@given(cores=st.integers(1, 64), prefill=st.integers(1, 20), decode=st.integers(1, 20))
def test_core_sets_are_disjoint_where_there_are_enough_and_pools_never_share(
    cores: int, prefill: int, decode: int
) -> None:
    workers = plan_placement(range(cores), num_prefill=prefill, num_decode=decode)
    used = {role: {core for w in workers if w.role is role for core in w.cores} for role in Role}
    assert not used[Role.PREFILL] & used[Role.DECODE]
    if cores >= prefill + decode:
        assert sorted(core for w in workers for core in w.cores) == list(range(cores))
    elif cores > 1:
        assert all(w.cores for w in workers)


def test_nobody_is_pinned_when_pinning_is_off() -> None:
    workers = plan_placement(range(4), num_prefill=1, num_decode=1, pin=False)
    assert all(worker.cores == () for worker in workers)


def test_worker_ids_name_pool_and_index() -> None:
    workers = plan_placement([0], num_prefill=2, num_decode=1)
    assert [worker.worker_id for worker in workers] == ["prefill-0", "prefill-1", "decode-0"]


def test_the_total_demand_holds_every_worker() -> None:
    workers = plan_placement(range(4), num_prefill=2, num_decode=1)
    assert total_resources(workers) == {"CPU": 4.0, "tandem_prefill": 2.0, "tandem_decode": 1.0}
