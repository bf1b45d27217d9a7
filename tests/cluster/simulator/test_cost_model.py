"""The figures that the articles derive, from a model's and a device's numbers alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.simulator.cost_model import (
    H100,
    Experts,
    ModelCost,
    Work,
    WorkerCost,
    chunks_of,
    cost_of,
    iteration_cost,
    num_iterations,
    num_pairs,
    transfer_s,
)
from cluster.simulator.models import LLAMA_2_7B, MIXTRAL_8X7B
from tandem.errors import ConfigError
from tests.published_configs import PUBLISHED, read

MODEL = WorkerCost(model=LLAMA_2_7B, device=H100)
CLOSE, COARSE = 0.10, 0.25
"""Tolerances: the second where the article rounds to one digit."""
DECODES = [Work(num_before=1000)] * 8
K = 1000


def test_the_ridge_and_the_size_of_a_token() -> None:
    assert pytest.approx(150, rel=CLOSE) == H100.ridge
    assert LLAMA_2_7B.token_bytes == 512 * 1024
    assert iteration_cost(LLAMA_2_7B, [Work(num_before=0)]).attention_flops == pytest.approx(0.52e6, rel=CLOSE)


@pytest.mark.parametrize(
    ("prefill", "linear", "attention", "wall_s"),
    [
        (0, 110e9, 4e9, 6e-3),
        (1 * K, 14e12, 0.3e12, 30e-3),
        (4 * K, 57e12, 4e12, 120e-3),
        (16 * K, 225e12, 67e12, 580e-3),
        (100 * K, 1.4e15, 2.6e15, 8.0),
    ],
)
def test_a_prefill_beside_eight_decodes(prefill: int, linear: float, attention: float, wall_s: float) -> None:
    batch = [*DECODES, Work(num_before=0, num_tokens=prefill)] if prefill else DECODES
    cost = iteration_cost(LLAMA_2_7B, batch)
    assert cost.linear_flops == pytest.approx(linear, rel=CLOSE)
    assert cost.attention_flops == pytest.approx(attention, rel=COARSE)
    assert MODEL.iteration_s(batch) == pytest.approx(wall_s, rel=CLOSE)


def test_a_short_prompt_in_the_same_forward_as_a_long_one_waits_for_all_of_it() -> None:
    short, long = Work(num_before=0, num_tokens=100), Work(num_before=0, num_tokens=10 * K)
    assert iteration_cost(LLAMA_2_7B, [short]).linear_flops == pytest.approx(1.4e12)
    assert iteration_cost(LLAMA_2_7B, [short]).attention_flops == pytest.approx(2.6e9, rel=CLOSE)
    assert MODEL.iteration_s([short]) == pytest.approx(4e-3, rel=CLOSE)
    assert MODEL.iteration_s([long]) == pytest.approx(320e-3, rel=CLOSE)
    both_s = MODEL.iteration_s([short, long])
    assert both_s == pytest.approx(330e-3, rel=CLOSE)
    assert both_s / MODEL.iteration_s([short]) == pytest.approx(80, rel=CLOSE)


def test_chunks_keep_the_pairs_and_read_rows_again() -> None:
    chunks = chunks_of(100 * K, chunk_tokens=2048)
    assert len(chunks) == num_iterations(100 * K, chunk_tokens=2048) == 49
    assert sum(map(num_pairs, chunks)) == num_pairs(Work(num_before=0, num_tokens=100 * K))
    assert num_pairs(Work(num_before=0, num_tokens=100 * K)) == pytest.approx((100 * K) ** 2 / 2, rel=0.001)
    rows = sum(chunk.num_before for chunk in chunks)
    assert rows == pytest.approx((100 * K) ** 2 / (2 * 2048), rel=CLOSE)
    assert rows / (100 * K) == pytest.approx(25, rel=CLOSE)


@pytest.mark.parametrize(
    ("context", "kv_bytes", "total_bytes", "intensity"),
    [(1, 16e9, 30e9, 15), (4, 64e9, 78e9, 5.7), (16, 256e9, 270e9, 1.7), (64, 1.0e12, 1.0e12, 0.4)],
)
def test_decode_of_thirty_two(context: int, kv_bytes: float, total_bytes: float, intensity: float) -> None:
    cost = iteration_cost(LLAMA_2_7B, [Work(num_before=context * K)] * 32)
    assert cost.weight_bytes == 14e9
    assert cost.kv_bytes == pytest.approx(kv_bytes, rel=CLOSE)
    assert cost.num_bytes == pytest.approx(total_bytes, rel=CLOSE)
    assert cost.intensity == pytest.approx(intensity, rel=CLOSE)
    assert cost.intensity < H100.ridge
    assert (cost.kv_bytes > MODEL.kv_room_bytes) == (context > 1), "only the first fits beside the weights"


def test_kv_weighs_as_much_as_the_weights_from_a_context_of_850_on() -> None:
    rows = LLAMA_2_7B.weight_bytes / LLAMA_2_7B.token_bytes
    assert rows == pytest.approx(27 * K, rel=CLOSE)
    assert rows / 32 == pytest.approx(850, rel=CLOSE)


@pytest.mark.parametrize(
    ("cached", "kv_bytes", "total_bytes", "intensity"),
    [(4, 2e9, 16e9, 1800), (64, 32e9, 46e9, 620), (256, 128e9, 142e9, 200), (1000, 512e9, 526e9, 55)],
)
def test_a_chunk_over_a_cached_prefix(cached: int, kv_bytes: float, total_bytes: float, intensity: float) -> None:
    cost = iteration_cost(LLAMA_2_7B, [Work(num_before=cached * K, num_tokens=2048)])
    assert cost.kv_bytes == pytest.approx(kv_bytes, rel=CLOSE)
    assert cost.num_bytes == pytest.approx(total_bytes, rel=CLOSE)
    assert cost.intensity == pytest.approx(intensity, rel=CLOSE)


@pytest.mark.parametrize(("gbps", "ms"), [(900, 2), (400, 5), (50, 40), (64, 30)])
def test_a_prompt_of_4096_tokens_on_its_way(gbps: float, ms: float) -> None:
    num_bytes = 4096 * LLAMA_2_7B.token_bytes
    assert num_bytes == 2 << 30
    assert transfer_s(num_bytes, bytes_per_s=gbps * 1e9) * 1e3 == pytest.approx(ms, rel=COARSE)


def test_fewer_kv_heads_make_the_transfer_as_much_smaller() -> None:
    grouped = replace(LLAMA_2_7B, num_kv_heads=8)
    assert LLAMA_2_7B.token_bytes / grouped.token_bytes == 4


def test_two_devices_share_the_work_and_sum_twice_a_layer() -> None:
    small = ModelCost(
        name="small", num_parameters=25e6, num_layers=8, num_heads=8, num_kv_heads=8, head_dim=64, hidden_size=512
    )
    assert small.num_all_reduces == 16
    alone, both = (WorkerCost(model=small, device=H100, num_devices=count) for count in (1, 2))
    batch = [Work(num_before=0, num_tokens=4096)]
    assert alone.reduce_s(4096) == 0
    assert both.reduce_s(4096) == pytest.approx(16 * 4096 * 512 * 2 / 900e9)
    assert both.iteration_s(batch) == pytest.approx(alone.iteration_s(batch) / 2 + both.reduce_s(4096))


def test_what_a_device_cannot_do_side_by_side_it_does_one_after_the_other() -> None:
    cost = iteration_cost(LLAMA_2_7B, DECODES)
    compute_s, read_s = cost.flops / H100.flops_per_s, cost.num_bytes / H100.bytes_per_s
    times = [WorkerCost(model=LLAMA_2_7B, device=replace(H100, overlap=share)).iteration_s(DECODES) for share in (0, 1)]
    assert times == pytest.approx([compute_s + read_s, read_s])
    with pytest.raises(ConfigError, match="overlap"):
        replace(H100, overlap=1.5)


def test_requests_in_a_batch_compute_no_score_between_each_other() -> None:
    full = [Work(num_before=0, num_tokens=count) for count in (10, 30)]
    assert sum(work.num_tokens**2 for work in full) == 1000
    assert sum(map(num_pairs, full)) == 10 * 11 / 2 + 30 * 31 / 2


@pytest.mark.parametrize(("before", "count"), [(0, 3), (0, 4), (0, 9), (2, 5), (4, 3), (7, 1)])
def test_a_window_bounds_what_a_query_sees(before: int, count: int) -> None:
    seen = sum(min(position + 1, 4) for position in range(before, before + count))
    assert num_pairs(Work(num_before=before, num_tokens=count), 4) == seen


def test_a_model_that_leaves_no_room_is_told_of() -> None:
    with pytest.raises(ConfigError, match="leaves no room"):
        WorkerCost(model=MIXTRAL_8X7B, device=H100).num_blocks(16)
    assert WorkerCost(model=MIXTRAL_8X7B, device=H100, num_devices=2).num_blocks(16) > 1000


def test_a_batch_reads_the_experts_that_its_tokens_choose() -> None:
    experts = Experts(num_experts=8, num_chosen=2, parameters_each=1.0)
    assert experts.met_by(1) == pytest.approx(2)
    assert experts.met_by(1000) == pytest.approx(8)
    assert MIXTRAL_8X7B.active_parameters == pytest.approx(12.9e9, rel=0.01)
    assert MIXTRAL_8X7B.read_weight_bytes(1) < MIXTRAL_8X7B.read_weight_bytes(4) < MIXTRAL_8X7B.weight_bytes


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("SmolLM2-135M", 0.1345),
        ("Llama-2-7b", 6.74),
        ("Qwen2.5-7B", 7.62),
        ("Mixtral-8x7B", 46.7),
        ("Qwen3-30B-A3B", 30.5),
    ],
)
def test_parameters_are_counted_from_a_published_configuration(name: str, billions: float) -> None:
    model = cost_of(read(PUBLISHED[name]), value_bytes=2)
    assert model.num_parameters == pytest.approx(billions * 1e9, rel=0.01)


def test_a_token_meets_the_chosen_experts_alone() -> None:
    model = cost_of(read(PUBLISHED["Qwen3-30B-A3B"]), value_bytes=2)
    assert model.active_parameters == pytest.approx(3.3e9, rel=0.03)


def test_layers_with_a_window_read_and_see_only_so_much() -> None:
    model = cost_of(read(PUBLISHED["Mistral-7B-v0.1"]), value_bytes=2)
    near, far = (iteration_cost(model, [Work(num_before=count)]) for count in (4096, 32_000))
    assert near.kv_bytes == far.kv_bytes == 4096 * model.token_bytes
    assert far.attention_flops == near.attention_flops
