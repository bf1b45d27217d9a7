"""Joint choice of a prefill and a decode worker."""

from __future__ import annotations

import pytest

from router.policy import route
from router.view import ClusterView, WorkerView
from tandem.errors import WorkerUnavailable
from tandem.types import Role
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
