"""Arrivals: drawn ones, and those of a trace."""

from __future__ import annotations

import math
import random
from statistics import fmean, pstdev

import pytest

from cluster.simulator.workload import Arrival, Lengths, from_trace, poisson
from tandem.errors import ConfigError
from tandem.types import BlockHash

ROW = {"timestamp": 3000, "input_length": 1100, "output_length": 7, "hash_ids": [5, 6, 9]}


def test_lengths_have_the_mean_and_the_deviation_that_were_asked_for() -> None:
    rng = random.Random(1)
    drawn = [Lengths(mean=2000, spread=0.5).draw(rng) for _ in range(20_000)]
    assert fmean(drawn) == pytest.approx(2000, rel=0.02)
    assert pstdev(drawn) == pytest.approx(1000, rel=0.05)
    assert {Lengths(mean=17).draw(rng) for _ in range(9)} == {17}


def test_independent_arrivals_come_at_the_rate_that_was_asked_for_and_again_from_the_same_seed() -> None:
    one, other = (
        poisson(random.Random(2), rate_per_s=5, num_requests=5000, prompt=Lengths(mean=9), output=Lengths(mean=3))
        for _ in range(2)
    )
    assert one == other
    assert one[-1].at_s == pytest.approx(1000, rel=0.05)


def test_a_trace_is_spread_over_what_it_is_rounded_to_and_sped_up() -> None:
    arrivals = from_trace([ROW] * 200, random.Random(3), speed=2.0, quantum_s=3.0)
    assert min(a.at_s for a in arrivals) >= 0.0
    assert max(a.at_s for a in arrivals) <= 1.5
    assert arrivals == sorted(arrivals, key=lambda arrival: arrival.at_s)
    assert len({arrival.at_s for arrival in arrivals}) == 200


@pytest.mark.parametrize("begins_ms", [0, -5_000_000, 1_790_000_000_000.5])
def test_time_begins_with_the_earliest_request_whatever_the_trace_counts_from(begins_ms: float) -> None:
    rows = [{**ROW, "timestamp": begins_ms + later_ms} for later_ms in (8000, 0)]
    arrivals = from_trace(rows, random.Random(3), quantum_s=0.0)
    assert [arrival.at_s for arrival in arrivals] == pytest.approx([0.0, 8.0])


def test_names_of_blocks_follow_the_ids_of_the_trace() -> None:
    [arrival] = from_trace([ROW], random.Random(3))
    names = arrival.block_names(128, number=1)
    assert len(names) == len(set(names)) == 1100 // 128
    assert names_of((5, 6, 10), number=2) == names  # of the third id there is no full block: 1100 tokens end in it
    assert (names_of((5, 7, 9), number=2)[:4], set(names_of((5, 7, 9), number=2)[4:]) & set(names)) == (
        names[:4],
        set(),
    )


def test_what_the_ids_do_not_cover_is_a_requests_own() -> None:
    one, other = names_of((5,), number=1), names_of((5,), number=2)
    assert len(one) == 8
    assert one[:4] == other[:4]
    assert not set(one[4:]) & set(other[4:])


def test_an_id_means_the_same_only_behind_the_same_ids() -> None:
    assert not set(names_of((5, 6), number=1)[4:]) & set(names_of((7, 6), number=1)[4:])


def names_of(ids: tuple[int, ...], *, number: int) -> tuple[BlockHash, ...]:
    arrival = Arrival(at_s=0, num_prompt_tokens=1100, num_output_tokens=1, prefix_ids=ids)
    return arrival.block_names(128, number=number)


@pytest.mark.parametrize(
    "row",
    [
        {"timestamp": 1},
        {**ROW, "timestamp": math.nan},
        {**ROW, "timestamp": math.inf},
        {**ROW, "timestamp": True},
        {**ROW, "input_length": 0},
        {**ROW, "input_length": math.inf},
        {**ROW, "input_length": 10**40},
        {**ROW, "output_length": "many"},
        {**ROW, "output_length": 5.5},
        {**ROW, "hash_ids": 3},
        {**ROW, "hash_ids": "123"},
        {**ROW, "hash_ids": [1, 10**40]},
        {**ROW, "hash_ids": [1.5]},
    ],
)
def test_a_row_that_is_no_request_is_named(row: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="row 2 of the trace"):
        from_trace([ROW, row], random.Random(3))
