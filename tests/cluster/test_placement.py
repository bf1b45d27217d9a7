"""Placement: who gets which cores, what a worker asks for, and what its name says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.placement import Selector, WorkerPlacement, choose_cores, gpus_of_ranks, parse_name, with_device
from cluster.ray_worker import cores_of_rank
from tandem.config import ClusterConfig, DecodeConfig, DeviceKind, ModelConfig, PrefillConfig
from tandem.types import Role, WorkerId

P, D = Role.PREFILL, Role.DECODE


def make_place(worker_id: str, cores: tuple[int, ...] = ()) -> WorkerPlacement:
    return WorkerPlacement(worker_id=WorkerId(worker_id), role=Role(worker_id.partition("-")[0]), cores=cores)


def grown(num_cores: int, order: list[Role], sizes: dict[Role, int]) -> list[tuple[int, ...]]:
    """Cores of workers that are started one after another."""
    placed: list[WorkerPlacement] = []
    for role in order:
        cores = choose_cores(role, range(num_cores), placed, sizes=sizes)
        placed.append(make_place(f"{role}-{len(placed)}", cores))
    return [place.cores for place in placed]


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
def test_a_first_start_spreads_the_cores_evenly_prefill_first(
    cores: int, prefill: int, decode: int, expected: list[tuple[int, ...]]
) -> None:
    assert grown(cores, [P] * prefill + [D] * decode, {P: prefill, D: decode}) == expected


def test_decode_started_first_leaves_a_core_for_prefill() -> None:
    assert grown(2, [D, D, P], {P: 1, D: 2}) == [(0,), (0,), (1,)]


def test_a_pool_that_is_not_wanted_keeps_no_core_free() -> None:
    assert grown(2, [D, D], {P: 0, D: 2}) == [(0,), (1,)]


def test_a_worker_more_shares_the_least_used_core_of_its_own_pool() -> None:
    others = [make_place("prefill-0", (0,)), make_place("decode-0", (1,)), make_place("prefill-1", (2,))]
    others.append(make_place("prefill-2", (0,)))
    assert choose_cores(P, range(3), others, sizes={P: 4, D: 1}) == (2,)


def test_cores_of_a_worker_that_has_gone_are_used_again() -> None:
    assert choose_cores(D, range(4), [make_place("prefill-0", (0, 1))], sizes={P: 1, D: 1}) == (2, 3)


@given(
    cores=st.integers(2, 16),
    order=st.lists(st.sampled_from(Role), max_size=12),
    sizes=st.fixed_dictionaries({P: st.integers(0, 6), D: st.integers(0, 6)}),
)
def test_pools_share_no_core_while_another_is_free(cores: int, order: list[Role], sizes: dict[Role, int]) -> None:
    placed: list[WorkerPlacement] = []
    for role in order:
        chosen = choose_cores(role, range(cores), placed, sizes=sizes)
        assert chosen
        free = set(range(cores)) - {core for place in placed for core in place.cores}
        rivals = {core for place in placed if place.role is not role for core in place.cores}
        own = {core for place in placed if place.role is role for core in place.cores}
        if set(chosen) & rivals:
            assert len(free) <= 1 and not (own - rivals)  # noqa: PT018
        placed.append(make_place(f"{role}-{len(placed)}", chosen))


def test_a_name_says_all_that_a_later_controller_needs() -> None:
    place = WorkerPlacement(worker_id=WorkerId("decode-12"), role=D, generation=3, cores=(1, 10))
    assert parse_name(place.name("my/cluster"), "my/cluster") == place
    unpinned = make_place("prefill-0")
    assert parse_name(unpinned.name("a"), "a") == unpinned


@pytest.mark.parametrize("name", ["", "a/decode-0", "b/decode-0/g0/c", "a/other-0/g0/c", "a/decode-x/g0/c", "a/b/c"])
def test_names_of_others_are_not_ours(name: str) -> None:
    assert parse_name(name, "a") is None


@pytest.mark.parametrize(
    ("wanted", "num_gpus", "expected"),
    [
        *[("cpu", 8.0, "cpu"), ("cuda", 0.0, "cuda")],
        *[("auto", 0.0, "cpu"), ("auto", 2.0, "cpu"), ("auto", 2.5, "cuda"), ("auto", 8.0, "cuda")],
    ],
)
def test_a_cluster_computes_on_gpus_where_there_are_enough_for_all_its_workers(
    wanted: DeviceKind, num_gpus: float, expected: DeviceKind
) -> None:
    config = ClusterConfig(
        model=ModelConfig(device=wanted),
        prefill=PrefillConfig(num_workers=1, tensor_parallel=2),
        decode=DecodeConfig(num_workers=1, gpus_per_rank=0.5),
    )
    found = with_device(config, num_gpus=num_gpus)
    assert found.model.device == expected
    shares = {P: 1.0, D: 0.5} if expected == "cuda" else {P: 0.0, D: 0.0}
    assert gpus_of_ranks(found) == shares


def test_a_worker_asks_for_a_slot_for_each_rank() -> None:
    place = WorkerPlacement(
        worker_id=WorkerId("decode-0"), role=D, num_ranks=2, selector=Selector(labels=(("ray.io/zone", "a"),))
    )
    assert place.bundles == [{"tandem_decode": 1.0}, {"tandem_decode": 1.0}]


@pytest.mark.parametrize(
    ("cores", "num_ranks", "expected"),
    [
        ([4, 5, 6, 7], 2, [[4, 5], [6, 7]]),
        ([4, 5, 6], 2, [[4], [5, 6]]),
        ([4], 2, [[4], [4]]),
        ([], 2, [[], []]),
    ],
)
def test_ranks_share_their_workers_cores(cores: list[int], num_ranks: int, expected: list[list[int]]) -> None:
    assert [cores_of_rank(cores, rank, num_ranks) for rank in range(num_ranks)] == expected
