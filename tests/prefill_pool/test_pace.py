"""How many tokens fit into an iteration's time."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from prefill_pool.pace import Pace, tokens_within


def make_pace(*, max_iteration_s: float = 0.5) -> Pace:
    return Pace(max_iteration_s=max_iteration_s, block_size=16, max_batch_tokens=512)


def test_without_a_limit_or_a_measurement_the_token_budget_alone_counts() -> None:
    assert make_pace().budget == 512
    pace = make_pace(max_iteration_s=0.0)
    pace.observe(10, 100.0)
    assert pace.budget == 512


def test_the_measured_speed_makes_tokens_of_the_time() -> None:
    pace = make_pace()
    pace.observe(512, 5.12)
    assert pace.budget == 50


def test_a_tiny_batch_says_little_of_the_speed() -> None:
    pace = make_pace()
    pace.observe(512, 1.0)
    before = pace.budget
    pace.observe(2, 0.04)
    assert 0.8 * before < pace.budget < before


def test_the_pace_of_a_worker_that_was_slow_once_is_found_again() -> None:
    pace = make_pace(max_iteration_s=0.1)
    pace.observe(512, 60.0)
    for _ in range(40):
        pace.observe(pace.budget, 0.01 + pace.budget * 0.001)
    assert 85 <= pace.budget <= 90


@given(max_s=st.floats(1e-4, 100), token_s=st.floats(1e-7, 10))
def test_an_iteration_is_never_longer_than_asked_but_for_one_block(max_s: float, token_s: float) -> None:
    count = tokens_within(max_s, token_s=token_s, block_size=16)
    assert count is not None
    assert count == 16 or count * token_s <= max_s * (1 + 1e-9)
    assert (count + 1) * token_s > max_s * (1 - 1e-9)
