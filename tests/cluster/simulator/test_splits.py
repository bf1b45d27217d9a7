"""Which cut of a number of workers is best."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest

from cluster.simulator.splits import Split, best_of, try_splits
from cluster.simulator.summary import Slo, figures_of, percentile
from cluster.simulator.workload import Arrival
from cluster.simulator.world import Outcome
from tandem.errors import ConfigError
from tests.simulated import TOKEN_S, make_arrival, make_plant, simulate

LONG_PROMPTS = [make_arrival(0.3 * number, prompt=500, output=4) for number in range(30)]
LONG_OUTPUTS = [make_arrival(0.05 * number, prompt=16, output=120) for number in range(60)]


def tried(arrivals: Sequence[Arrival], slo: Slo) -> list[Split]:
    plant = make_plant(control_s=0.0, decode={"max_batch_sequences": 4})
    return list(try_splits(plant, arrivals, num_workers=3, slo=slo))


def kept(arrivals: Sequence[Arrival], slo: Slo) -> dict[str, float]:
    return {split.label: split.figures["slo_attained"] for split in tried(arrivals, slo)}


def test_long_prompts_ask_for_prefill_workers() -> None:
    promises = kept(LONG_PROMPTS, Slo(ttft_s=1.0))
    assert promises["2 + 1"] == 1 > 2 * promises["1 + 2"]


def test_long_outputs_ask_for_decode_workers() -> None:
    promises = kept(LONG_OUTPUTS, Slo(tbt_s=6 * TOKEN_S))
    assert promises["1 + 2"] > 2 * promises["2 + 1"]


def test_one_pool_is_best_where_only_the_first_token_counts() -> None:
    assert best_of(tried([make_arrival(prompt=500, output=4)] * 9, Slo(ttft_s=1.8))).is_colocated


def test_every_cut_serves_the_same_requests() -> None:
    splits = list(try_splits(make_plant(), LONG_PROMPTS, num_workers=4, slo=Slo()))
    assert [split.label for split in splits] == ["1 + 3", "2 + 2", "3 + 1", "colocated"]
    assert all(split.figures["requests"] == 30 and split.figures["slo_attained"] == 1 for split in splits)


def test_one_worker_cannot_be_cut() -> None:
    with pytest.raises(ConfigError, match="2 or more"):
        list(try_splits(make_plant(), LONG_PROMPTS, num_workers=1, slo=Slo()))


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1), (0.5, 2), (0.51, 3), (0.9, 4), (1.0, 4)])
def test_a_percentile_is_one_of_the_values(share: float, expected: float) -> None:
    assert percentile([1, 2, 3, 4], share) == expected


def test_of_nothing_there_is_no_percentile() -> None:
    assert math.isnan(percentile([], 0.5))


def test_a_promise_is_kept_by_requests_that_keep_both_of_its_parts() -> None:
    outcome = simulate(make_plant(control_s=0.0), make_arrival(prompt=100, output=9))
    [life] = outcome.lives
    assert Slo(ttft_s=life.ttft_s, tbt_s=life.mean_tbt_s).is_met(life)
    assert not Slo(ttft_s=life.ttft_s * 0.99).is_met(life)
    assert not Slo(tbt_s=life.mean_tbt_s * 0.99).is_met(life)
    assert figures_of(outcome, Slo(ttft_s=0.01))["slo_attained"] == 0
    assert "slo_attained" not in figures_of(outcome)


def test_refused_requests_count_as_promises_that_were_not_kept() -> None:
    plant = make_plant(prefill={"num_blocks": 8}, decode={"num_blocks": 8})
    outcome = simulate(plant, make_arrival(prompt=500), make_arrival(prompt=50))
    figures = figures_of(outcome, Slo())
    assert (figures["refused"], figures["slo_attained"]) == (1, 0.5)


def test_a_run_in_which_nothing_happened_has_figures_too() -> None:
    outcome = simulate(make_plant(prefill={"num_blocks": 8}, decode={"num_blocks": 8}), make_arrival(prompt=500))
    empty = replace(outcome, lives=(), gaps_s=array("d"))
    for each in (outcome, empty):
        figures = figures_of(each, Slo())
        assert math.isnan(figures["ttft_p50_s"])
        assert figures["requests_per_s"] == figures["messages_per_handoff"] == 0
    assert isinstance(outcome, Outcome)
