"""One request between its two legs, over every order of events."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from router.lifecycle import Action, Emit, Fail, OpenPrefill, RequestLifecycle, StopChoice
from tandem.errors import HandoffFailed, WorkerUnavailable
from tandem.types import FinishReason, TokenStep


def step(position: int, token_id: int, reason: FinishReason | None = None, choice: int = 0) -> TokenStep:
    return TokenStep(position=position, token_id=token_id, finish_reason=reason, choice=choice)


def emitted(actions: list[Action]) -> list[int]:
    return [a.step.token_id for a in actions if isinstance(a, Emit)]


def test_the_prefill_leg_opens_only_when_the_decode_worker_knows_the_request() -> None:
    lifecycle = RequestLifecycle(has_decode=True)
    assert lifecycle.start() == []
    assert lifecycle.accepted() == [OpenPrefill()]
    assert lifecycle.accepted() == []


def test_without_a_decode_leg_the_prefill_leg_opens_at_once() -> None:
    assert RequestLifecycle(has_decode=False).start() == [OpenPrefill()]


def test_decoded_tokens_wait_for_the_first_token() -> None:
    lifecycle = RequestLifecycle(has_decode=True)
    assert emitted(lifecycle.token(step(1, 11, None))) == []
    assert emitted(lifecycle.token(step(0, 10, None))) == [10, 11]


def test_a_leg_that_fails_after_the_last_token_is_no_failure() -> None:
    lifecycle = RequestLifecycle(has_decode=True)
    lifecycle.token(step(0, 10, FinishReason.STOP))
    assert lifecycle.leg_failed("decode", HandoffFailed("late")) == []
    assert lifecycle.complete


def test_legs_that_end_without_the_last_token_fail_the_request() -> None:
    lifecycle = RequestLifecycle(has_decode=True)
    lifecycle.token(step(0, 10, None))
    assert lifecycle.leg_done("prefill") == []
    (failure,) = lifecycle.leg_done("decode")
    assert isinstance(failure, Fail)
    assert isinstance(failure.error, WorkerUnavailable)


def test_a_request_is_complete_when_every_choice_is() -> None:
    lifecycle = RequestLifecycle(has_decode=True, num_choices=2)
    lifecycle.token(step(0, 10, FinishReason.STOP, choice=1))
    assert not lifecycle.complete
    assert emitted(lifecycle.token(step(0, 11, choice=0))) == [11]
    lifecycle.token(step(1, 12, FinishReason.LENGTH, choice=0))
    assert lifecycle.complete


def test_a_stopped_choice_gives_nothing_more_and_the_decode_worker_is_told() -> None:
    lifecycle = RequestLifecycle(has_decode=True, num_choices=2)
    lifecycle.token(step(0, 10, choice=1))
    assert lifecycle.stop(1) == [StopChoice(choice=1)]
    assert lifecycle.stop(1) == []
    assert lifecycle.token(step(1, 11, choice=1)) == []
    lifecycle.token(step(0, 12, FinishReason.STOP, choice=0))
    assert lifecycle.complete
    lifecycle.check_invariants()


@given(st.integers(1, 6), st.data())
def test_tokens_leave_in_order_exactly_once_and_the_first_failure_is_the_only_one(
    length: int, data: st.DataObject
) -> None:
    lifecycle = RequestLifecycle(has_decode=True)
    events = [("token", i) for i in range(length)] * data.draw(st.integers(1, 2))
    events += [("fail", 0)] * data.draw(st.integers(0, 2))
    out: list[int] = []
    failures = 0
    for kind, position in data.draw(st.permutations(events)):
        if kind == "token":
            reason = FinishReason.LENGTH if position == length - 1 else None
            actions = lifecycle.token(step(position, position, reason))
        else:
            actions = lifecycle.leg_failed("decode", HandoffFailed("lost"))
        lifecycle.check_invariants()
        out += emitted(actions)
        failures += sum(isinstance(a, Fail) for a in actions)
    assert out == list(range(len(out)))
    assert failures <= 1
    assert lifecycle.complete == (len(out) == length)
    assert lifecycle.complete or lifecycle.failed
