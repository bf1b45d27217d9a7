"""Shaping of logits: transformers' own processors where it has them, the formulas where it has not."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import given, settings
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tandem.model.choice import Choice
from tandem.model.history import TokenHistory
from tandem.model.logits import shape_logits
from tandem.model.sampler import _candidates
from tandem.types import SamplingParams

VOCAB = 60
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=12)


def make_choice(prompt: list[int], output: list[int], **sampling: Any) -> Choice:
    params = SamplingParams(**{"max_tokens": 100, **sampling})
    choice = Choice(params, history=TokenHistory(prompt) if params.needs_history else None)
    for token_id in output:
        choice.append(token_id)
    return choice


def make_logits(num_rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4


def shaped(logits: torch.Tensor, *choices: Choice) -> torch.Tensor:
    changed = logits.clone()
    shape_logits(changed, choices)
    return changed


@settings(max_examples=40, deadline=None)
@given(TOKENS.filter(bool), TOKENS, st.floats(0.5, 3.0))
def test_the_repetition_penalty_is_that_of_transformers(prompt: list[int], output: list[int], penalty: float) -> None:
    logits = make_logits()
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits.clone())
    ours = shaped(logits, make_choice(prompt, output, repetition_penalty=penalty))
    torch.testing.assert_close(ours, theirs)


@settings(max_examples=40, deadline=None)
@given(TOKENS, TOKENS, st.floats(-2, 2), st.floats(-2, 2))
def test_presence_and_frequency_penalties_count_the_output_alone(
    prompt: list[int], output: list[int], presence: float, frequency: float
) -> None:
    logits = make_logits()
    counts = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=VOCAB)
    expected = logits - presence * (counts > 0) - frequency * counts
    ours = shaped(logits, make_choice(prompt, output, presence_penalty=presence, frequency_penalty=frequency))
    torch.testing.assert_close(ours, expected)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 6), st.integers(0, 6))
def test_stop_tokens_are_held_off_as_by_transformers(num_output: int, min_tokens: int) -> None:
    logits, stops = make_logits(), [3, 17]
    processor = MinNewTokensLengthLogitsProcessor(4, min_tokens, stops, device="cpu")
    theirs = processor(torch.zeros(1, 4 + num_output, dtype=torch.int64), logits.clone())
    ours = shaped(logits, make_choice([0] * 4, [5] * num_output, min_tokens=min_tokens, stop_token_ids=tuple(stops)))
    assert ours.equal(theirs)


def test_a_bias_is_added_to_its_token_alone() -> None:
    logits = make_logits()
    ours = shaped(logits, make_choice([], [], logit_bias=((2, 5.0), (40, -100.0))))
    assert (ours != logits).nonzero()[:, 1].tolist() == [2, 40]
    torch.testing.assert_close((ours - logits)[0, [2, 40]], torch.tensor([5.0, -100.0]))


KINDS: list[dict[str, Any]] = [
    {},
    {"presence_penalty": 1.0, "logit_bias": ((3, 2.0),)},
    {"repetition_penalty": 1.5, "frequency_penalty": 0.5},
    {"min_tokens": 9, "stop_token_ids": (1, 2)},
    {"logit_bias": ((3, -4.0), (9, 1.0)), "min_tokens": 9, "stop_token_ids": (3,)},
]


def test_rows_of_a_batch_are_shaped_as_each_would_be_alone_and_plain_ones_not_at_all() -> None:
    logits = make_logits(len(KINDS))
    choices = [make_choice([1, 2, 3], [3, 4], **kind) for kind in KINDS]
    together = shaped(logits, *choices)
    for row, choice in enumerate(choices):
        assert together[row].equal(shaped(logits[row : row + 1], choice)[0])
    assert together[0].equal(logits[0])


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([0.5, 1.0, 1.7]),
    st.sampled_from([0, 1, 5, 30, 100]),
    st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    st.integers(0, 20),
)
def test_what_top_k_top_p_and_min_p_keep_is_what_transformers_keeps(
    temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    logits = make_logits(seed=seed).double()
    warpers: list[Any] = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [MinPLogitsWarper(min_p)] if min_p else []
    theirs = logits
    for warper in warpers:
        theirs = warper(torch.zeros(1, 1, dtype=torch.int64), theirs)
    params = SamplingParams(max_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    kept = _candidates(logits[0] / temperature, params)
    ours = set(range(VOCAB)) if kept is None else set(kept.tolist())
    assert ours == set(theirs[0].isfinite().nonzero().flatten().tolist())


@settings(max_examples=40, deadline=None)
@given(TOKENS, st.lists(st.integers(0, 2 * VOCAB), max_size=60))
def test_a_history_counts_what_was_appended_and_its_copies_go_their_own_way(
    prompt: list[int], output: list[int]
) -> None:
    history = TokenHistory(prompt)
    untouched = history.copy()
    for token_id in output:
        history.append(token_id)
    counts = dict(zip(history.ids.tolist(), history.counts.tolist(), strict=True))
    assert counts == {token_id: output.count(token_id) for token_id in {*prompt, *output}}
    assert sorted(untouched.ids.tolist()) == sorted(set(prompt))
    assert not untouched.counts.any()


