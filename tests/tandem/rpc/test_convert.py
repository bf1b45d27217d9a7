"""Proto and types: round trips, and typed errors for what a peer must not send."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.errors import DeadlineExceeded, InvalidRequest
from tandem.rpc import convert
from tandem.rpc.tandem.v1 import worker_pb2
from tandem.types import (
    FinishReason,
    Grammar,
    GrammarKind,
    HandoffId,
    Request,
    RequestId,
    SamplingParams,
    TokenLogprobs,
    TokenStep,
)

HANDOFF = HandoffId("0123456789abcdef" * 2)
INT32_MAX = 2**31 - 1


def make_request(**changes: object) -> Request:
    values = {
        "request_id": RequestId("r1"),
        "prompt_token_ids": (5, 6, 7),
        "sampling": SamplingParams(
            max_tokens=4, temperature=0.5, top_p=0.25, top_k=3, seed=2**64 - 1, stop_token_ids=(2,)
        ),
        "arrival_s": 100.0,
        "deadline_s": 130.0,
    }
    return Request(**{**values, **changes})  # type: ignore[arg-type]


def make_prefill(**changes: object) -> worker_pb2.PrefillRequest:
    message = convert.prefill_request_to_proto(make_request(), now=100.0, handoff=None)
    message.MergeFrom(worker_pb2.PrefillRequest(**changes))  # type: ignore[arg-type]
    return message


SAMPLINGS = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(0, INT32_MAX),
    min_p=st.floats(0, 1),
    seed=st.integers(0, 2**64 - 1),
    max_tokens=st.integers(7, INT32_MAX),
    stop_token_ids=st.lists(st.integers(0, INT32_MAX), max_size=5).map(tuple),
    min_tokens=st.integers(0, 7),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0, 10, exclude_min=True),
    logit_bias=st.dictionaries(st.integers(0, INT32_MAX), st.floats(-100, 100), max_size=4).map(
        lambda biases: tuple(sorted(biases.items()))
    ),
    num_logprobs=st.none() | st.integers(0, 20),
    num_prompt_logprobs=st.none() | st.integers(0, 20),
    grammar=st.none() | st.builds(Grammar, kind=st.sampled_from(GrammarKind), text=st.text()),
)
LOGPROBS = st.lists(st.tuples(st.integers(0, INT32_MAX), st.floats(-100, 0, width=32)), max_size=3).flatmap(
    lambda top: st.builds(
        TokenLogprobs,
        logprob=st.floats(-100, 0, width=32),
        top_ids=st.just(tuple(token_id for token_id, _ in top)),
        top_logprobs=st.just(tuple(value for _, value in top)),
    )
)


@settings(max_examples=50, deadline=None)
@given(SAMPLINGS)
def test_sampling_survives_the_round_trip_bit_for_bit(sampling):
    assert convert.sampling_from_proto(convert.sampling_to_proto(sampling)) == sampling


@settings(max_examples=50, deadline=None)
@given(
    st.builds(
        TokenStep,
        position=st.integers(0, INT32_MAX),
        token_id=st.integers(0, INT32_MAX),
        finish_reason=st.sampled_from([None, *FinishReason]),
        choice=st.integers(0, 127),
        logprobs=st.none() | LOGPROBS,
    )
)
def test_tokens_survive_the_round_trip_on_both_legs(step):
    assert convert.decoded_token_from_proto(convert.decoded_token_to_proto(step)) == step
    first = replace(step, position=0)
    assert convert.first_token_from_proto(convert.first_token_to_proto(first)) == first


def test_the_prefill_leg_carries_the_request_and_the_time_left():
    request = make_request()
    target = worker_pb2.HandoffTarget(handoff_id=HANDOFF, decode_worker_id="d0", decode_address="127.0.0.1:1")
    message = convert.prefill_request_to_proto(request, now=110.0, handoff=target)
    assert message.timeout_s == pytest.approx(20.0)
    received = convert.prefill_request_from_proto(message, now=5.0)
    assert received.prompt_token_ids == request.prompt_token_ids
    assert received.sampling == request.sampling
    assert (received.arrival_s, received.deadline_s) == (5.0, pytest.approx(25.0))


def test_the_decode_leg_carries_the_request_and_the_handoff():
    message = convert.decode_request_to_proto(make_request(), now=100.0, handoff_id=HANDOFF)
    assert message.handoff_id == HANDOFF
    assert convert.decode_request_from_proto(message, now=1.0).prompt_token_ids == (5, 6, 7)


def test_both_legs_carry_the_priority():
    request = make_request(priority=-3)
    prefill = convert.prefill_request_to_proto(request, now=100.0, handoff=None)
    decode = convert.decode_request_to_proto(request, now=100.0, handoff_id=HANDOFF)
    assert convert.prefill_request_from_proto(prefill, now=1.0).priority == -3
    assert convert.decode_request_from_proto(decode, now=1.0).priority == -3


def test_a_request_whose_time_is_up_is_not_sent():
    with pytest.raises(DeadlineExceeded):
        convert.prefill_request_to_proto(make_request(), now=130.0, handoff=None)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt_token_ids": [-1]}, "prompt_token_ids"),
        ({"sampling": {"stop_token_ids": [-1]}}, "stop_token_ids"),
        ({"sampling": {"max_tokens": -1}}, "max_tokens"),
        ({"sampling": {"temperature": -0.5}}, "temperature"),
        ({"sampling": {"temperature": float("nan")}}, "temperature"),
        ({"sampling": {"top_p": 1.5}}, "top_p"),
        ({"sampling": {"top_k": -2}}, "top_k"),
        ({"sampling": {"min_p": 2.0}}, "min_p"),
        ({"sampling": {"min_tokens": 5}}, "min_tokens"),
        ({"sampling": {"presence_penalty": -3.0}}, "presence_penalty"),
        ({"sampling": {"frequency_penalty": float("nan")}}, "frequency_penalty"),
        ({"sampling": {"repetition_penalty": -1.0}}, "repetition_penalty"),
        ({"sampling": {"bias_token_ids": [1]}}, "bias_token_ids"),
        ({"sampling": {"bias_token_ids": [1], "biases": [101.0]}}, "biases"),
        ({"sampling": {"num_logprobs": 21}}, "num_logprobs"),
        ({"sampling": {"num_prompt_logprobs": -1}}, "num_prompt_logprobs"),
        ({"sampling": {"grammar": {"kind": "prose"}}}, "grammar.kind"),
        ({"num_choices": 129}, "num_choices"),
        ({"priority": -101}, "priority"),
        ({"priority": 101}, "priority"),
        ({"timeout_s": -1.0}, "timeout_s"),
        ({"timeout_s": float("nan")}, "timeout_s"),
        ({"handoff": {"handoff_id": "zz", "decode_address": "a:1"}}, "handoff_id"),
        ({"handoff": {"handoff_id": HANDOFF}}, "handoff.decode_address"),
    ],
)
def test_a_wrong_wire_value_is_an_error_that_names_its_field(changes, param):
    with pytest.raises(InvalidRequest) as caught:
        convert.prefill_request_from_proto(make_prefill(**changes), now=0.0)
    assert caught.value.param == param


@pytest.mark.parametrize("field", ["prompt_token_ids", "request_id", "sampling"])
def test_a_missing_field_is_an_error(field):
    message = make_prefill()
    message.ClearField(field)
    with pytest.raises(InvalidRequest):
        convert.prefill_request_from_proto(message, now=0.0)


@pytest.mark.parametrize("reason", [None, *FinishReason])
def test_finish_reasons_survive_the_round_trip(reason):
    assert convert.finish_reason_from_proto(convert.finish_reason_to_proto(reason)) is reason


def test_an_unknown_finish_reason_is_an_error():
    with pytest.raises(InvalidRequest):
        convert.finish_reason_from_proto(77)
