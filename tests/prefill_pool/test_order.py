"""The order of prompts: short ones first, and nobody starves."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
from hypothesis import given, settings

from prefill_pool.scheduler import PrefillPlan, PrefillScheduler
from tandem.kv.prefix_pool import PrefixPool
from tandem.types import PRIORITY_S, Request, RequestId, WorkerId
from tests.factories import make_request, sampled

DECODE = WorkerId("d0")
RATE = 10.0


def make_scheduler(*, num_blocks: int = 1024, budget: int = 16, lookahead: int = 1 << 20) -> PrefillScheduler:
    return PrefillScheduler(
        PrefixPool(num_blocks),
        block_size=4,
        max_batch_tokens=budget,
        max_batch_sequences=8,
        ticket_lookahead_tokens=lookahead,
        ageing_tokens_per_s=RATE,
    )


def run(scheduler: PrefillScheduler, *, elapsed_s: float = 0.0) -> tuple[PrefillPlan, list[RequestId]]:
    """One iteration; who is done with it gives its blocks back."""
    plan = scheduler.schedule()
    tokens = [sampled(7) if chunk.is_last else [] for chunk in plan.chunks]
    outputs = scheduler.commit(plan, tokens, elapsed_s=elapsed_s)
    for output in outputs:
        scheduler.release(output.request_id)
    scheduler.check_invariants()
    return plan, [output.request_id for output in outputs]


def names(plan: PrefillPlan) -> list[str]:
    return [chunk.request.request_id for chunk in plan.chunks]


def test_a_short_prompt_overtakes_a_long_one_between_two_chunks() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("long", num_prompt_tokens=100), destination=None)
    run(scheduler)
    scheduler.add(make_request("short", num_prompt_tokens=8, arrival_s=1.0), destination=None)
    plan, done = run(scheduler)
    assert [(c.request.request_id, c.start, c.num_tokens) for c in plan.chunks] == [("short", 0, 8)]
    assert done == ["short"]
    [chunk] = run(scheduler)[0].chunks
    assert (chunk.request.request_id, chunk.start) == ("long", 16)


def test_a_long_prompt_fills_an_iteration_that_ends_a_short_one_only_to_a_quarter_of_the_budget() -> None:
    scheduler = make_scheduler(budget=64)
    scheduler.add(make_request("long", num_prompt_tokens=100), destination=None)
    scheduler.add(make_request("short", num_prompt_tokens=6), destination=None)
    plan, _ = run(scheduler)
    assert [(c.request.request_id, c.num_tokens) for c in plan.chunks] == [("short", 6), ("long", 10)]


def test_neither_a_part_nor_the_rest_of_a_long_prompt_follows_a_whole_iteration_into_the_one_of_a_short_one() -> None:
    for num_long, num_short in ((100, 2), (25, 4)):
        scheduler = make_scheduler(budget=16)
        scheduler.add(make_request("long", num_prompt_tokens=num_long), destination=None)
        assert run(scheduler)[0].num_tokens == 16
        scheduler.add(make_request("short", num_prompt_tokens=num_short), destination=None)
        assert names(run(scheduler)[0]) == ["short"]
        assert names(run(scheduler)[0]) == ["long"]


def test_an_overtaken_prompt_keeps_its_blocks_and_goes_on_where_it_was() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("long", num_prompt_tokens=100), destination=None)
    [before] = run(scheduler)[0].chunks
    scheduler.add(make_request("short", num_prompt_tokens=16, arrival_s=1.0), destination=None)
    assert names(run(scheduler)[0]) == ["short"]
    [after] = run(scheduler)[0].chunks
    assert (after.start, after.block_ids) == (16, before.block_ids)


def test_a_prompt_that_waited_long_enough_is_not_overtaken() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("long", num_prompt_tokens=100), destination=None)
    scheduler.add(make_request("short", num_prompt_tokens=1, arrival_s=100 / RATE), destination=None)
    assert names(run(scheduler)[0]) == ["long"]


def test_a_prompt_does_not_age_while_it_is_computed() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("long", num_prompt_tokens=100), destination=None)
    for _ in range(5):
        assert names(run(scheduler, elapsed_s=2.0)[0]) == ["long"]
    scheduler.add(make_request("short", num_prompt_tokens=16, arrival_s=10.0), destination=None)
    assert names(run(scheduler, elapsed_s=2.0)[0]) == ["short"]


def test_a_level_of_priority_counts_like_seconds_of_waiting() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("first", num_prompt_tokens=16), destination=None)
    scheduler.add(
        make_request("urgent", num_prompt_tokens=16, arrival_s=PRIORITY_S - 0.1, priority=-1), destination=None
    )
    scheduler.add(make_request("late", num_prompt_tokens=16, arrival_s=PRIORITY_S + 0.1, priority=-1), destination=None)
    assert [name for _ in range(3) for name in names(run(scheduler)[0])] == ["urgent", "first", "late"]


def test_a_long_prompt_most_of_which_is_cached_counts_as_a_short_one() -> None:
    scheduler = make_scheduler(budget=64)
    scheduler.add(make_request("before", num_prompt_tokens=61, salt=""), destination=None)
    run(scheduler)
    scheduler.add(make_request("short", num_prompt_tokens=8), destination=None)
    scheduler.add(make_request("cached", num_prompt_tokens=61, salt=""), destination=None)
    assert names(run(scheduler)[0]) == ["cached", "short"]


def test_what_the_store_offers_counts_as_cached() -> None:
    scheduler = make_scheduler(budget=64)
    scheduler.add(make_request("offered", num_prompt_tokens=61, salt=""), destination=None)
    scheduler.fetching(RequestId("offered"))
    scheduler.add(make_request("short", num_prompt_tokens=8), destination=None)
    scheduler.fetched(RequestId("offered"), range(15))
    assert names(run(scheduler)[0]) == ["offered", "short"]


def test_a_long_prompt_does_not_hold_up_the_tickets_of_short_ones_behind_it() -> None:
    scheduler = make_scheduler(lookahead=32)
    scheduler.add(make_request("long", num_prompt_tokens=400), destination=DECODE)
    assert scheduler.wanted_tickets() == ("long",)
    for i in range(6):
        scheduler.add(make_request(f"short{i}", num_prompt_tokens=10, arrival_s=1.0), destination=DECODE)
    assert scheduler.wanted_tickets() == ("short0", "short1", "short2", "short3")


def test_a_prompt_without_blocks_lets_started_ones_pass_but_no_new_ones() -> None:
    scheduler = make_scheduler(num_blocks=6, budget=8)
    scheduler.add(make_request("running", num_prompt_tokens=20), destination=None)
    run(scheduler)
    scheduler.add(make_request("waits", num_prompt_tokens=8), destination=None)
    scheduler.add(make_request("fits", num_prompt_tokens=4, arrival_s=0.5), destination=None)
    assert names(run(scheduler)[0]) == ["running"]
    assert [names(run(scheduler)[0]) for _ in range(2)] == [["running"], ["waits"]]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_prompt_is_overtaken_only_by_those_that_come_before_its_tokens_over_the_ageing_rate(
    data: st.DataObject,
) -> None:
    """And so it is done when at most those are: whatever comes, in whatever sizes, for as long as it likes."""
    scheduler = make_scheduler(budget=data.draw(st.integers(1, 40)))
    waiting: dict[RequestId, Request] = {}
    served_s: Counter[str] = Counter()
    now = 0.0
    for i in range(data.draw(st.integers(1, 60))):
        now += data.draw(st.floats(0, 5))
        request = make_request(
            f"r{i}",
            num_prompt_tokens=data.draw(st.integers(1, 120)),
            arrival_s=now,
            priority=data.draw(st.sampled_from([0, 0, 0, -2, 1])),
        )
        scheduler.add(request, destination=None)
        waiting[request.request_id] = request
        elapsed_s = data.draw(st.floats(0, 3))
        plan, done = run(scheduler, elapsed_s=elapsed_s)
        computed = set(names(plan))
        for first in waiting.values():
            last_s = first.order_s + served_s[first.request_id] + len(first.prompt_token_ids) / RATE
            overtaking = [c for c in plan.chunks if c.request.order_s >= last_s]
            assert first.request_id in computed or not overtaking
        served_s.update(dict.fromkeys(computed, elapsed_s))
        for request_id in done:
            del waiting[request_id]


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_with_few_blocks_too_every_prompt_ends_while_shorter_ones_come_without_end(data: st.DataObject) -> None:
    scheduler = make_scheduler(num_blocks=data.draw(st.integers(10, 20)), budget=8)
    scheduler.add(make_request("long", num_prompt_tokens=40), destination=None)
    for turn in range(2000):
        arrival_s = 0.1 * turn
        size = data.draw(st.integers(4, 12)) if turn < 40 else 8
        scheduler.add(make_request(f"r{turn}", num_prompt_tokens=size, arrival_s=arrival_s), destination=None)
        if "long" in run(scheduler)[1]:
            return
        assert arrival_s < 40 / RATE + 10, "starved"
