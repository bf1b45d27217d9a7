"""Which failed requests are tried again, and what is kept away from."""

from __future__ import annotations

import pytest

from router.policy import Route
from router.retry import MAX_ATTEMPTS, RetryState
from router.view import ClusterView, WorkerView
from tandem.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    HandoffFailed,
    IncompatiblePeer,
    LinkClosed,
    RequestCancelled,
    TandemError,
    WorkerUnavailable,
)
from tandem.types import Epoch, Role
from tests.factories import make_worker_view

PREFILL, DECODE = make_worker_view("p0", Role.PREFILL), make_worker_view("d0", Role.DECODE)
ROUTE = Route(prefill=PREFILL, decode=DECODE)


@pytest.mark.parametrize("error", [WorkerUnavailable("lost"), HandoffFailed("lost"), LinkClosed("closed")])
def test_a_request_without_output_is_tried_again_when_a_worker_or_the_way_between_two_failed(
    error: TandemError,
) -> None:
    assert RetryState().may_retry(error, has_output=False)
    assert not RetryState().may_retry(error, has_output=True)


@pytest.mark.parametrize(
    "error",
    [DeadlineExceeded("late"), RequestCancelled("gone"), ContextLengthExceeded("long"), IncompatiblePeer("other")],
)
def test_what_another_worker_would_refuse_too_is_not_tried_again(error: TandemError) -> None:
    assert not RetryState().may_retry(error, has_output=False)


def test_attempts_are_bounded() -> None:
    state = RetryState()
    error = HandoffFailed("lost")
    for _ in range(MAX_ATTEMPTS - 1):
        assert state.may_retry(error, has_output=False)
        state.note_failure(error, leg="prefill", on=ROUTE)
    assert not state.may_retry(error, has_output=False)


@pytest.mark.parametrize(("leg", "bad"), [("prefill", "p0"), ("decode", "d0")])
def test_a_lost_worker_is_avoided(leg: str, bad: str) -> None:
    state = RetryState()
    state.note_failure(WorkerUnavailable("lost"), leg=leg, on=ROUTE)  # type: ignore[arg-type]
    assert state.bad_workers == {(bad, 1)}
    others = (make_worker_view("p1", Role.PREFILL), make_worker_view("d1", Role.DECODE))
    view = ClusterView(workers=(PREFILL, DECODE, *others))
    left = view.without(frozenset(state.bad_workers), frozenset())
    assert left.pairs()
    assert all(bad not in (p.worker_id, d.worker_id) for p, d in left.pairs())


def test_after_a_failed_handoff_only_the_pair_is_avoided() -> None:
    state = RetryState()
    state.note_failure(HandoffFailed("lost"), leg="prefill", on=ROUTE)
    view = ClusterView(workers=(PREFILL, DECODE, make_worker_view("d1", Role.DECODE)))
    left = view.without(frozenset(state.bad_workers), frozenset(state.bad_pairs))
    assert [(p.worker_id, d.worker_id) for p, d in left.pairs()] == [("p0", "d1")]


def test_the_successor_of_a_lost_worker_is_not_avoided() -> None:
    state = RetryState()
    state.note_failure(WorkerUnavailable("lost"), leg="decode", on=ROUTE)
    successor = make_worker_view("d0", Role.DECODE, epoch=Epoch(2))
    assert not ClusterView(workers=(PREFILL, DECODE)).without(state.bad_workers, state.bad_pairs).pairs()
    assert ClusterView(workers=(PREFILL, successor)).without(state.bad_workers, state.bad_pairs).pairs()


@pytest.mark.parametrize(
    ("workers", "coming", "expected"),
    [
        ((PREFILL,), {Role.DECODE}, True),
        ((PREFILL, DECODE), {Role.DECODE}, True),
        ((), {Role.DECODE}, False),
        ((PREFILL, DECODE), set(), False),
        ((PREFILL, DECODE), {Role.PREFILL}, False),
    ],
)
def test_waiting_helps_when_each_pool_has_a_good_worker_or_one_that_is_coming(
    workers: tuple[WorkerView, ...], coming: set[Role], expected: bool
) -> None:
    view = ClusterView(workers=workers, coming=frozenset(coming)).without({DECODE.incarnation}, set())
    assert view.may_recover() is expected
