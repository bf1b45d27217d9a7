"""Bounds and defaults of what a client asks; every message names field, value and bound."""

from __future__ import annotations

import math

import pytest

from router.validation import (
    ContextLimit,
    SamplingOptions,
    check_options,
    check_request_id,
    check_text,
    check_token_ids,
    resolve_sampling,
    resolve_timeout,
)
from tandem.errors import ContextLengthExceeded, InvalidRequest
from tandem.types import SamplingParams

VOCAB = 100


def resolve(options: SamplingOptions, num_prompt_tokens: int = 10) -> SamplingParams:
    return resolve_within(ContextLimit(tokens=64, model_tokens=64), options, num_prompt_tokens)


def resolve_within(context: ContextLimit, options: SamplingOptions, num_prompt_tokens: int) -> SamplingParams:
    return resolve_sampling(
        options, num_prompt_tokens=num_prompt_tokens, context=context, eos_token_ids=(2,), random_seed=77
    )


@pytest.mark.parametrize(
    ("field", "value", "bound"),
    [
        ("temperature", -0.1, "0.0 to 2.0"),
        ("temperature", 2.1, "0.0 to 2.0"),
        ("temperature", math.nan, "0.0 to 2.0"),
        ("temperature", math.inf, "0.0 to 2.0"),
        ("top_p", 0.0, "more than 0.0 and at most 1.0"),
        ("top_p", 1.01, "more than 0.0 and at most 1.0"),
        ("top_k", -2, "-1 to 2147483647"),
        ("top_k", 2**31, "-1 to 2147483647"),
        ("seed", -(2**63) - 1, "-9223372036854775808 to 18446744073709551615"),
        ("seed", 2**64, "-9223372036854775808 to 18446744073709551615"),
        ("max_tokens", 0, "1 or more"),
        ("max_tokens", -5, "1 or more"),
        ("stop", ("a",) * 17, "at most 16"),
        ("stop", ("",), "empty"),
        ("stop", ("\ud800",), "surrogate"),
        ("stop_token_ids", (-1,), "0 to 99"),
        ("stop_token_ids", (3, 100), "0 to 99"),
    ],
)
def test_a_wrong_value_is_refused_by_name_with_its_bound(field, value, bound):
    with pytest.raises(InvalidRequest, match=field) as caught:
        check_options(SamplingOptions(**{field: value}), vocab_size=VOCAB)
    assert caught.value.param == field
    assert bound in caught.value.message


@pytest.mark.parametrize(
    "values",
    [{}, {"temperature": 0.0}, {"temperature": 2, "top_p": 1, "top_k": 0, "seed": 2**64 - 1, "max_tokens": 1}],
)
def test_edge_values_are_fine(values):
    check_options(SamplingOptions(**values), vocab_size=VOCAB)


def test_a_token_id_beyond_the_vocabulary_is_named_with_its_place():
    with pytest.raises(InvalidRequest, match=r"prompt\[1\] must be 0 to 99 \(the vocabulary\), got 100"):
        check_token_ids([99, 100], vocab_size=VOCAB, param="prompt")


def test_an_empty_text_and_a_lone_surrogate_are_refused():
    with pytest.raises(InvalidRequest, match="prompt is empty"):
        check_text("", param="prompt")
    with pytest.raises(InvalidRequest, match="lone surrogate at character 2"):
        check_text("ab\udfff", param="prompt")


@pytest.mark.parametrize("request_id", ["", "a b", "x" * 129, "é", "a\n"])
def test_odd_request_ids_are_refused(request_id):
    with pytest.raises(InvalidRequest, match="request_id"):
        check_request_id(request_id)


@pytest.mark.parametrize(("given", "taken"), [(None, 9.0), (0, 9.0), (0.5, 0.5)])
def test_a_timeout_defaults(given, taken):
    assert resolve_timeout(given, default_s=9.0) == taken


@pytest.mark.parametrize("timeout_s", [-1, math.nan, math.inf, 86_401])
def test_an_odd_timeout_is_refused(timeout_s):
    with pytest.raises(InvalidRequest, match="timeout_s"):
        resolve_timeout(timeout_s, default_s=9.0)


def test_defaults_fill_the_context_and_draw_the_seed():
    assert resolve(SamplingOptions()) == SamplingParams(max_tokens=54, seed=77, stop_token_ids=(2,))


def test_ignore_eos_leaves_only_the_clients_stop_tokens():
    assert resolve(SamplingOptions(ignore_eos=True, stop_token_ids=(5,))).stop_token_ids == (5,)
    assert resolve(SamplingOptions(stop_token_ids=(5, 2))).stop_token_ids == (2, 5)


def test_zero_is_not_taken_for_absent():
    sampling = resolve(SamplingOptions(temperature=0.0, seed=0))
    assert (sampling.temperature, sampling.seed) == (0.0, 0)


def test_an_empty_prompt_is_refused():
    with pytest.raises(InvalidRequest, match="prompt is empty"):
        resolve(SamplingOptions(), num_prompt_tokens=0)


def test_a_prompt_that_fills_the_context_is_refused_with_the_numbers():
    assert resolve(SamplingOptions(), num_prompt_tokens=63).max_tokens == 1
    with pytest.raises(ContextLengthExceeded, match=r"64 tokens .* context of 64 tokens; .* at most 63") as caught:
        resolve(SamplingOptions(), num_prompt_tokens=64)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("num_prompt_tokens", [1, 330])
def test_where_the_pools_are_smaller_than_the_model_they_are_named_as_the_limit(num_prompt_tokens):
    context = ContextLimit(tokens=320, model_tokens=8192)
    with pytest.raises(ContextLengthExceeded) as caught:
        resolve_within(context, SamplingOptions(max_tokens=400), num_prompt_tokens)
    limit = "this cluster's limit of 320 tokens (the size of its KV pools; the model could take 8192)"
    assert limit in caught.value.message
    assert "the model's context" not in caught.value.message


def test_max_tokens_beyond_the_context_is_refused_in_the_clients_words():
    assert resolve(SamplingOptions(max_tokens=54)).max_tokens == 54
    with pytest.raises(ContextLengthExceeded, match=r"max_completion_tokens=55 .* at most 54") as caught:
        resolve(SamplingOptions(max_tokens=55, max_tokens_field="max_completion_tokens"))
    assert caught.value.param == "max_completion_tokens"
