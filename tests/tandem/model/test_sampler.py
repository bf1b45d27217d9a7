"""Noise has fixed values; choices depend on logits, parameters and position alone and follow the distribution."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.model.sampler import sample, sample_rows, uniform
from tandem.types import SamplingParams

DRAW = SamplingParams(max_tokens=1, temperature=1.0)
GREEDY = replace(DRAW, temperature=0.0)


@pytest.mark.parametrize(
    ("seed", "position", "values"),
    [
        (0, 0, [0.011546790599822998, 0.24154919385910034]),
        (0, 1, [0.8133540749549866, 0.7513313889503479]),
        (1, 0, [0.3035680651664734, 0.8487088084220886]),
        (2**64 - 1, 7, [0.07488101720809937, 0.8492814898490906]),
        (1234, 100_000, [0.664250910282135, 0.27984994649887085]),
    ],
)
def test_noise_has_these_values_on_every_machine(seed: int, position: int, values: list[float]) -> None:
    assert uniform(seed, position, 2).tolist() == values


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32))
def test_noise_is_strictly_between_zero_and_one_and_does_not_depend_on_the_size(seed: int, position: int) -> None:
    values = uniform(seed, position, 500)
    assert float(values.min()) > 0.0
    assert float(values.max()) < 1.0
    assert values[:7].equal(uniform(seed, position, 7))


def test_rounding_of_the_logits_hardly_ever_moves_a_choice() -> None:
    """Logits of a wide vocabulary, disturbed as by another cut of the batch: at most 1 choice in 500 may move."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2000, generator=generator) * 2
    disturbed = logits + (torch.rand(2000, generator=generator) - 0.5) * 2e-4
    moved = sum(sample(logits, DRAW, i) != sample(disturbed, DRAW, i) for i in range(1000))
    assert moved <= 2


def test_temperature_zero_takes_the_lowest_of_the_most_likely_ids() -> None:
    assert sample(torch.tensor([0.0, 3.0, 1.0, 3.0]), GREEDY, 0) == 1


def drawn(logits: torch.Tensor, params: SamplingParams, count: int = 400) -> torch.Tensor:
    """How often each token was drawn, over positions `0 .. count - 1`."""
    tokens = [sample(logits, params, position) for position in range(count)]
    return torch.bincount(torch.tensor(tokens), minlength=len(logits))


def test_draws_follow_the_probabilities() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.0, 0.2])
    shares = drawn(probabilities.log(), DRAW, 2000) / 2000
    assert (shares - probabilities).abs().max() < 0.04
    assert shares[2] == 0


def test_top_k_keeps_the_k_most_likely_and_the_lowest_ids_among_equals() -> None:
    counts = drawn(torch.tensor([0.0, 1.0, 1.0, 1.0, -1.0]), replace(DRAW, top_k=2))
    assert counts.nonzero().flatten().tolist() == [1, 2]


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    assert drawn(logits, replace(DRAW, top_p=0.65)).nonzero().flatten().tolist() == [1, 3]
    assert drawn(logits, replace(DRAW, top_p=0.75)).nonzero().flatten().tolist() == [1, 2, 3]
    assert drawn(logits, replace(DRAW, top_p=1e-9)).nonzero().flatten().tolist() == [1]


def test_top_p_applies_to_what_top_k_left() -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    counts = drawn(logits, replace(DRAW, top_k=2, top_p=0.5))
    assert counts.nonzero().flatten().tolist() == [1]


@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_top_p_is_the_same_whether_the_nucleus_is_small_or_most_of_the_vocabulary(spread: float) -> None:
    logits = torch.randn(2000, generator=torch.Generator().manual_seed(1)) * spread
    order = torch.sort(logits.double(), descending=True, stable=True)
    masses = (order.values - order.values[0]).exp().cumsum(0)
    count = int((masses < masses[-1] * 0.9).sum()) + 1
    kept = set(order.indices[:count].tolist())
    assert {sample(logits, replace(DRAW, top_p=0.9), i) for i in range(300)} <= kept


@pytest.mark.parametrize("params", [DRAW, replace(DRAW, top_k=5), replace(DRAW, top_p=0.5), GREEDY])
def test_tokens_without_probability_are_never_drawn(params: SamplingParams) -> None:
    logits = torch.full((300,), float("-inf"))
    logits[[3, 250]] = torch.tensor([1.0, 2.0])
    assert {sample(logits, params, i) for i in range(50)} <= {3, 250}


@pytest.mark.parametrize("temperature", [1e-6, 2.0])
def test_extreme_temperatures_give_tokens(temperature: float) -> None:
    logits = torch.tensor([40.0, -40.0, 39.0])
    assert 0 <= sample(logits, replace(DRAW, temperature=temperature), 3) < 3


def test_rows_of_a_batch_are_sampled_as_each_would_be_alone() -> None:
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(2))
    kinds = [GREEDY, DRAW, replace(DRAW, top_k=9), replace(DRAW, top_p=0.7), replace(DRAW, seed=8), GREEDY]
    rows = [(params, 3 * i) for i, params in enumerate(kinds)]
    assert sample_rows(logits, rows) == [sample(logits[i], *row) for i, row in enumerate(rows)]
