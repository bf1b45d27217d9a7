"""Proto and types: round trips, and typed errors for what a peer must not send."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.errors import DeadlineExceeded, InvalidRequest
from tandem.rpc import convert
from tandem.rpc.tandem.v1 import worker_pb2
from tandem.types import FinishReason, HandoffId, Request, RequestId, SamplingParams

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


@given(
    temperature=st.floats(0, 2, width=32),
    top_p=st.floats(0, 1, width=32, exclude_min=True),
    top_k=st.integers(0, INT32_MAX),
    seed=st.integers(0, 2**64 - 1),
    max_tokens=st.integers(1, INT32_MAX),
    stops=st.lists(st.integers(0, INT32_MAX), max_size=5),
)
def test_sampling_survives_the_round_trip(temperature, top_p, top_k, seed, max_tokens, stops):
    sampling = SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, max_tokens=max_tokens, stop_token_ids=tuple(stops)
    )
    assert convert.sampling_from_proto(convert.sampling_to_proto(sampling)) == sampling


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
