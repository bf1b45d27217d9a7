"""Whole simulated clusters: times that can be reckoned by hand, and what must hold in every run."""

from __future__ import annotations

import math
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from cluster.simulator.cost_model import Work
from cluster.simulator.life import Life
from cluster.simulator.summary import figures_of
from cluster.simulator.world import OVERLOADED
from kv_transfer.sizing import POST_S, Chunk, LinkSpeed, message_layers
from tandem.errors import ConfigError
from tests.simulated import CONTROL_S, FAST, MODEL, NUM_LAYERS, TOKEN_S, make_arrival, make_plant, simulate

FIRST_SIZE = 1
"""Layers in a message while nothing has been measured."""


def test_a_request_alone_takes_its_control_messages_its_chunks_and_its_iterations() -> None:
    plant = make_plant()
    [life] = simulate(plant, make_arrival(prompt=1000, output=3)).lives
    chunks = [Work(num_before=0, num_tokens=512), Work(num_before=512, num_tokens=488)]
    prefill_s = sum(plant.prefill_cost.iteration_s([chunk]) for chunk in chunks)
    post_s = POST_S * life.num_messages
    started_s = 3 * CONTROL_S  # the leg, the offer, the ticket
    assert life.queue_s == pytest.approx(started_s)
    assert life.prefill_s == pytest.approx(prefill_s + post_s)
    assert life.ttft_s == pytest.approx(started_s + prefill_s + post_s + CONTROL_S)
    steps_s = [plant.decode_cost.iteration_s([Work(num_before=count)]) for count in (1000, 1001)]
    assert life.ended_s - life.first_token_s == pytest.approx(CONTROL_S + sum(steps_s))
    assert life.exposed_s < 1e-6
    assert life.num_output_tokens == 3


def test_a_request_for_one_token_is_not_handed_over() -> None:
    outcome = simulate(make_plant(), make_arrival(output=1))
    [life] = outcome.lives
    assert (life.decode, life.num_messages, life.num_output_tokens) == (None, 0, 1)
    assert outcome.usage["decode"].num_iterations == 0


def second_of_two(link: LinkSpeed, *, prompt: int, **transfer: int) -> Life:
    """The first one measures the worker's pace."""
    plant = make_plant(link=link, control_s=0.0, prefill={"max_batch_tokens": 4096}, transfer=transfer)
    return simulate(plant, make_arrival(prompt=prompt), make_arrival(1e4, prompt=prompt)).lives[1]


def test_while_nothing_is_measured_each_layer_is_a_message_and_then_short_prompts_go_in_one() -> None:
    outcome = simulate(make_plant(), make_arrival(prompt=16), make_arrival(1e3, prompt=16))
    assert [life.num_messages for life in outcome.lives] == [NUM_LAYERS // FIRST_SIZE, 1]


def test_a_long_prompt_over_a_slow_link_goes_layer_by_layer() -> None:
    slow = LinkSpeed(bytes_per_s=MODEL.token_bytes / TOKEN_S, latency_s=1e-4)
    assert second_of_two(slow, prompt=512).num_messages == NUM_LAYERS


@pytest.mark.parametrize("prompt", [16, 128, 1024])
@pytest.mark.parametrize("speed_up", [1.0, 20.0, 1e4])
def test_what_live_workers_would_choose_is_chosen_and_nothing_fixed_is_quicker(prompt: int, speed_up: float) -> None:
    link = LinkSpeed(bytes_per_s=speed_up * MODEL.token_bytes / TOKEN_S, latency_s=2e-4)
    chosen = second_of_two(link, prompt=prompt)
    sized = Chunk(
        num_layers=NUM_LAYERS,
        layer_bytes=prompt * MODEL.token_bytes // NUM_LAYERS,
        layer_s=chosen.prefill_s / NUM_LAYERS,
    )
    assert chosen.num_messages == math.ceil(NUM_LAYERS / message_layers(sized, link))
    fixed = [second_of_two(link, prompt=prompt, layers_per_message=size) for size in range(1, NUM_LAYERS + 1)]
    whole_s = min(life.prefill_s + life.exposed_s for life in fixed)
    assert chosen.prefill_s + chosen.exposed_s <= whole_s * (1 + 1e-6)


@pytest.mark.parametrize("prompt", [1026, 1400, 2048])
@pytest.mark.parametrize("speed_up", [0.5, 1.3, 8.0])
def test_a_prompt_of_several_chunks_is_exposed_for_no_longer_than_with_any_fixed_size(
    prompt: int, speed_up: float
) -> None:
    def last_of_two(size: int) -> Life:
        link = LinkSpeed(bytes_per_s=speed_up * MODEL.token_bytes / TOKEN_S, latency_s=2e-4)
        plant = make_plant(link=link, control_s=0.0, transfer={"layers_per_message": size})
        return simulate(plant, make_arrival(prompt=prompt), make_arrival(1e4, prompt=prompt)).lives[1]

    chosen, *fixed = (last_of_two(size) for size in range(NUM_LAYERS + 1))
    best_s = min(life.prefill_s + life.exposed_s for life in fixed)
    assert chosen.prefill_s + chosen.exposed_s <= best_s + POST_S * chosen.num_messages


def test_blocks_that_the_decode_worker_holds_are_not_sent_again() -> None:
    plant = make_plant()
    first = make_arrival(prompt=1030, ids=(1, 2, 3))
    second = make_arrival(1e3, prompt=1500, ids=(1, 2, 4))
    one, other = simulate(plant, first, second).lives
    assert one.num_held_bytes == 0
    assert other.num_held_bytes == 1024 * MODEL.token_bytes
    assert other.num_sent_bytes == (94 * 16 - 1024) * MODEL.token_bytes
    assert other.num_cached_tokens == 1024


def test_what_was_cached_nowhere_near_is_computed_when_prefixes_are_not_kept() -> None:
    plant = make_plant(prefix_store={"enabled": False})
    lives = simulate(plant, *(make_arrival(at_s, prompt=1030, ids=(1, 2, 3)) for at_s in (0.0, 1e3))).lives
    assert [life.num_cached_tokens for life in lives] == [0, 0]


def test_a_long_prompt_stretches_the_tokens_of_others_only_without_pools() -> None:
    plant = make_plant(control_s=0.0, prefill={"num_blocks": 2048}, decode={"num_blocks": 2048})
    streams, prompts = [make_arrival(prompt=16, output=200)] * 2, [make_arrival(0.1, prompt=4000, output=2)] * 2
    arrivals = [*streams, *prompts]  # two workers without pools: one of each for both
    apart, together = (simulate(plant, *arrivals, is_colocated=colocated) for colocated in (False, True))
    assert max(together.gaps_s) > 0.5
    assert max(apart.gaps_s) < 0.01 * max(together.gaps_s)
    assert together.num_messages == 0


def test_what_can_never_fit_is_refused_and_the_rest_goes_on() -> None:
    plant = make_plant(prefill={"num_blocks": 8}, decode={"num_blocks": 8})
    outcome = simulate(plant, make_arrival(prompt=129), make_arrival(prompt=120, output=20), make_arrival(prompt=100))
    assert [bool(life.refused) for life in outcome.lives] == [True, True, False]
    assert outcome.lives[2].is_complete


def test_a_full_decode_worker_holds_prompts_back_until_there_is_room() -> None:
    plant = make_plant(decode={"num_blocks": 8})
    outcome = simulate(plant, *(make_arrival(prompt=100, output=20) for _ in range(3)))
    first, second, third = sorted(outcome.lives, key=lambda life: life.prefill_started_s)
    assert first.ended_s <= second.prefill_started_s < second.ended_s <= third.prefill_started_s


def test_work_is_shared_between_workers_of_a_pool() -> None:
    plant = make_plant(prefill={"num_workers": 2}, decode={"num_workers": 3})
    lives = simulate(plant, *(make_arrival(prompt=200) for _ in range(12))).lives
    assert {life.prefill for life in lives} == {"prefill-0", "prefill-1"}
    assert {life.decode for life in lives} == {"decode-0", "decode-1", "decode-2"}


def test_several_stages_are_refused_rather_than_reckoned_as_one() -> None:
    with pytest.raises(ConfigError, match=r"decode\.pipeline_parallel must be 1"):
        make_plant(decode={"pipeline_parallel": 2})


@st.composite
def workloads(draw: st.DrawFn) -> list[tuple[float, int, int, list[int]]]:
    row = st.tuples(
        st.floats(0, 3),
        st.integers(1, 1200),
        st.integers(1, 60),
        st.lists(st.integers(0, 2), max_size=3),
    )
    return draw(st.lists(row, min_size=1, max_size=12))


@settings(max_examples=30)
@given(
    workload=workloads(),
    num_workers=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    num_blocks=st.tuples(st.integers(70, 200), st.integers(80, 200)),
    mb_per_s=st.sampled_from([0.05, 5.0, 500.0]),
    is_colocated=st.booleans(),
)
def test_every_request_ends_no_block_is_lost_and_the_same_comes_again(
    workload: list[tuple[float, int, int, list[int]]],
    num_workers: tuple[int, int],
    num_blocks: tuple[int, int],
    mb_per_s: float,
    is_colocated: bool,
) -> None:
    plant = make_plant(
        link=replace(FAST, bytes_per_s=mb_per_s * 1e6),
        control_s=0.01,
        prefill={"num_workers": num_workers[0], "num_blocks": num_blocks[0]},
        decode={"num_workers": num_workers[1], "num_blocks": num_blocks[1]},
    )
    arrivals = [make_arrival(at, prompt=prompt, output=output, ids=ids) for at, prompt, output, ids in workload]
    outcome = simulate(plant, *arrivals, is_colocated=is_colocated)
    for life in outcome.lives:
        assert life.refused or life.num_output_tokens == life.request.sampling.max_tokens
        if life.num_messages:
            blocks = -(-life.num_prompt_tokens // 16) * 16 * MODEL.token_bytes
            assert life.num_sent_bytes + life.num_held_bytes == blocks
    assert simulate(plant, *arrivals, is_colocated=is_colocated).lives == outcome.lives


def test_more_requests_than_the_router_takes_at_once_are_refused_and_counted_apart() -> None:
    plant = make_plant(router={"max_running_requests": 2})
    outcome = simulate(plant, make_arrival(), make_arrival(), make_arrival(), make_arrival(1e4))
    assert [life.refused for life in outcome.lives] == ["", "", OVERLOADED, ""]
    figures = figures_of(outcome)
    assert (figures["refused"], figures["overloaded"]) == (1, 1)


def test_what_is_longer_than_the_configured_context_is_refused() -> None:
    plant = make_plant(model={"block_size": 16, "max_context_tokens": 100})
    fitting, longer = simulate(plant, make_arrival(prompt=90, output=10), make_arrival(prompt=90, output=11)).lives
    assert fitting.is_complete
    assert "max_context_tokens" in longer.refused


@pytest.mark.parametrize("is_colocated", [False, True])
def test_a_prompt_beyond_all_memory_is_refused_without_being_written_out(is_colocated: bool) -> None:
    [life] = simulate(make_plant(), make_arrival(prompt=10**15), is_colocated=is_colocated).lives
    assert "KV" in life.refused
