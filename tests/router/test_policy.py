"""Joint choice of a prefill and a decode worker."""

from __future__ import annotations

import pytest

from router.policy import route
from router.view import CachedPrefix, ClusterView, WorkerView
from tandem.errors import WorkerUnavailable
from tandem.types import Epoch, Role, WorkerId
from tests.factories import make_request, make_worker_view

P, D = Role.PREFILL, Role.DECODE


def test_the_prefill_worker_with_fewer_tokens_before_it_is_taken() -> None:
    view = ClusterView(
        workers=(
            make_worker_view("p0", P, num_waiting_tokens=900),
            make_worker_view("p1", P, num_waiting_tokens=100),
            make_worker_view("d0", D),
        )
    )
    assert route(view, make_request(), 0.0).prefill.worker_id == "p1"


def test_the_decode_worker_with_more_room_left_is_taken() -> None:
    view = ClusterView(
        workers=(
            make_worker_view("p0", P),
            make_worker_view("d0", D, num_used_blocks=40),
            make_worker_view("d1", D, num_used_blocks=50, num_blocks=128),
        )
    )
    chosen = route(view, make_request(), 0.0).decode
    assert chosen is not None
    assert chosen.worker_id == "d1"


def test_only_workers_with_the_same_model_layout_and_transport_are_paired() -> None:
    view = ClusterView(
        workers=(
            make_worker_view("p0", P, fingerprint="old"),
            make_worker_view("p1", P, num_waiting_tokens=10_000),
            make_worker_view("d0", D, transport="ucx", fingerprint="old"),
            make_worker_view("d1", D),
        )
    )
    chosen = route(view, make_request(), 0.0)
    assert (chosen.prefill.worker_id, chosen.decode and chosen.decode.worker_id) == ("p1", "d1")


def test_shared_memory_pairs_only_workers_of_one_host_and_ucx_any() -> None:
    far = make_worker_view("d0", D, node="other")
    assert ClusterView(workers=(make_worker_view("p0", P), far)).pairs() == []
    over_ucx = (make_worker_view("p0", P, transport="ucx"), make_worker_view("d0", D, node="other", transport="ucx"))
    assert len(ClusterView(workers=over_ucx).pairs()) == 1


def test_a_request_of_one_token_needs_no_decode_worker() -> None:
    view = ClusterView(workers=(make_worker_view("p0", P), make_worker_view("d0", D)))
    assert route(view, make_request(max_tokens=1), 0.0).decode is None


@pytest.mark.parametrize("workers", [(), (make_worker_view("p0", P),), (make_worker_view("d0", D),)])
def test_without_a_pair_the_request_is_refused_and_may_be_tried_again(workers: tuple[WorkerView, ...]) -> None:
    with pytest.raises(WorkerUnavailable) as refused:
        route(ClusterView(workers=workers), make_request(), 0.0)
    assert refused.value.retry_after_s


def test_equal_workers_are_taken_in_turn_as_requests_pile_up() -> None:
    workers = [make_worker_view(f"p{i}", P, num_requests=2 - i) for i in range(3)] + [make_worker_view("d0", D)]
    assert route(ClusterView(workers=tuple(workers)), make_request(), 0.0).prefill.worker_id == "p2"


def test_a_prefill_worker_that_has_the_prefix_is_taken_until_its_queue_outweighs_it() -> None:
    request = make_request(num_prompt_tokens=640)
    cached = {WorkerId("p1"): CachedPrefix(device=30, host=30, disk=30, remote=30)}
    for queue, chosen in ((0, "p1"), (400, "p1"), (500, "p0")):
        view = ClusterView(
            workers=(
                make_worker_view("p0", P),
                make_worker_view("p1", P, num_waiting_tokens=queue),
                make_worker_view("d0", D),
            ),
            cached=cached,
        )
        assert route(view, request, 0.0).prefill.worker_id == chosen


def test_a_nearer_tier_is_worth_more() -> None:
    request = make_request(num_prompt_tokens=640)
    tiers = (CachedPrefix(remote=30), CachedPrefix(host=30, disk=30, remote=30), CachedPrefix(device=30, remote=30))
    names = [WorkerId(f"p{i}") for i in range(3)]
    workers = (*(make_worker_view(name, P) for name in names), make_worker_view("d0", D))
    view = ClusterView(workers=workers, cached=dict(zip(names, tiers, strict=True)))
    assert route(view, request, 0.0).prefill.worker_id == "p2"
    without_device = view.without({(WorkerId("p2"), Epoch(1))}, set())
    assert route(without_device, request, 0.0).prefill.worker_id == "p1"


def test_a_decode_worker_that_holds_the_prefix_is_taken_until_it_is_fuller_by_more_than_that() -> None:
    request = make_request(num_prompt_tokens=320)
    cached = {WorkerId("d1"): CachedPrefix(device=20, host=20, disk=20, remote=20)}
    for used, chosen in ((0, "d1"), (19, "d1"), (21, "d0")):
        view = ClusterView(
            workers=(
                make_worker_view("p0", P),
                make_worker_view("d0", D),
                make_worker_view("d1", D, num_used_blocks=used),
            ),
            cached=cached,
        )
        to = route(view, request, 0.0)
        assert to.decode is not None
        assert to.decode.worker_id == chosen
        assert to.num_held_blocks == (20 if chosen == "d1" else 0)


def test_what_is_expected_to_be_cached_leaves_a_token_to_compute_and_all_where_they_are_scored() -> None:
    cached = {WorkerId("p0"): CachedPrefix(device=4, host=4, disk=4, remote=4)}
    view = ClusterView(workers=(make_worker_view("p0", P), make_worker_view("d0", D)), cached=cached)
    assert route(view, make_request(num_prompt_tokens=64), 0.0).num_cached_tokens == 48
    scored = make_request(num_prompt_tokens=64, num_prompt_logprobs=0)
    assert route(view, scored, 0.0).num_cached_tokens == 0
