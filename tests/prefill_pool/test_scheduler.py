"""The prefill scheduler: budget, order, tickets, and blocks that always come back."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from prefill_pool.scheduler import FirstOutput, PrefillPlan, PrefillScheduler
from tandem.kv.prefix_pool import PrefixPool
from tandem.types import FinishReason, RequestId, WorkerId
from tests.factories import make_request, sampled

DECODE = WorkerId("d0")


def make_scheduler(*, num_blocks: int = 64, budget: int = 32, lookahead: int = 1 << 20) -> PrefillScheduler:
    return PrefillScheduler(
        PrefixPool(num_blocks),
        block_size=4,
        max_batch_tokens=budget,
        max_batch_sequences=8,
        ticket_lookahead_tokens=lookahead,
        ageing_tokens_per_s=1.0,
    )


def run(scheduler: PrefillScheduler, token: int = 7) -> tuple[PrefillPlan, tuple[FirstOutput, ...]]:
    plan = scheduler.schedule()
    outputs = scheduler.commit(plan, [sampled(token) if chunk.is_last else [] for chunk in plan.chunks])
    scheduler.check_invariants()
    return plan, outputs


def test_a_long_prompt_is_cut_at_the_budget_and_sampled_once_at_its_end() -> None:
    scheduler = make_scheduler(budget=32)
    scheduler.add(make_request(num_prompt_tokens=70), destination=None)
    sizes, outputs = [], []
    while not scheduler.is_idle:
        plan, output = run(scheduler)
        sizes.append(plan.num_tokens)
        outputs += output
    assert sizes == [32, 32, 6]
    assert [step.token_id for o in outputs for step in o.steps] == [7]


def test_prompts_share_a_batch_the_shortest_first_and_equal_ones_as_they_came() -> None:
    scheduler = make_scheduler(budget=32)
    for name, length in (("a", 10), ("b", 30), ("c", 10)):
        scheduler.add(make_request(name, num_prompt_tokens=length), destination=None)
    plan, _ = run(scheduler)
    assert [(c.request.request_id, c.num_tokens) for c in plan.chunks] == [("a", 10), ("c", 10)]
    plan, _ = run(scheduler)
    assert [(c.request.request_id, c.start, c.num_tokens) for c in plan.chunks] == [("b", 0, 30)]


def test_a_prompt_waits_for_its_ticket_and_holds_no_blocks_meanwhile() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(), destination=DECODE)
    assert scheduler.schedule().chunks == ()
    assert scheduler.wanted_tickets() == (RequestId("r0"),)
    assert scheduler.wanted_tickets() == ()
    assert scheduler.pool.num_free == 64
    scheduler.ticket(RequestId("r0"))
    plan, _ = run(scheduler)
    assert len(plan.chunks) == 1


def test_a_ticket_that_comes_after_the_prompts_end_starts_nothing() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(), destination=DECODE)
    assert scheduler.wanted_tickets() == (RequestId("r0"),)
    scheduler.abort(RequestId("r0"))
    scheduler.ticket(RequestId("r0"))
    assert scheduler.schedule().chunks == ()


def test_a_full_decode_worker_holds_up_nobody_elses_prompts() -> None:
    scheduler = make_scheduler(lookahead=8)
    for name in ("a", "b", "c"):
        scheduler.add(make_request(name, num_prompt_tokens=8), destination=DECODE)
    scheduler.add(make_request("d", num_prompt_tokens=8), destination=WorkerId("d1"))
    assert scheduler.wanted_tickets() == (RequestId("a"), RequestId("d"))
    scheduler.ticket(RequestId("d"))
    plan, _ = run(scheduler)
    assert [c.request.request_id for c in plan.chunks] == ["d"]


def test_prompts_wait_while_blocks_are_out_and_go_on_when_they_come_back() -> None:
    scheduler = make_scheduler(num_blocks=4, budget=64)
    for name in ("a", "b"):
        scheduler.add(make_request(name, num_prompt_tokens=12), destination=None)
    assert [c.request.request_id for c in run(scheduler)[0].chunks] == ["a"]
    assert run(scheduler)[0].chunks == ()
    scheduler.release(RequestId("a"))
    assert [c.request.request_id for c in run(scheduler)[0].chunks] == ["b"]


def test_blocks_that_a_running_iteration_writes_are_freed_only_when_it_is_committed() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(num_prompt_tokens=8), destination=None)
    plan = scheduler.schedule()
    scheduler.abort(RequestId("r0"))
    scheduler.release(RequestId("r0"))
    assert scheduler.pool.num_free == 62
    assert scheduler.commit(plan, [sampled(7)]) == ()
    assert scheduler.pool.num_free == 64


def test_the_first_token_obeys_every_finish_rule() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("stop", stop_token_ids=(7,)), destination=None)
    scheduler.add(make_request("length", max_tokens=1), destination=None)
    scheduler.add(make_request("goes on"), destination=None)
    _, outputs = run(scheduler)
    assert [step.finish_reason for o in outputs for step in o.steps] == [FinishReason.STOP, FinishReason.LENGTH, None]


def test_each_choice_has_a_first_token_of_its_own_from_one_prefill() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(num_choices=3, stop_token_ids=(9,)), destination=None)
    plan = scheduler.schedule()
    [output] = scheduler.commit(plan, [sampled(7, 9, 8)])
    assert [(s.choice, s.token_id, s.finish_reason) for s in output.steps] == [
        (0, 7, None),
        (1, 9, FinishReason.STOP),
        (2, 8, None),
    ]


def test_a_prefix_that_was_computed_before_is_not_computed_again() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", num_prompt_tokens=10, salt=""), destination=None)
    run(scheduler)
    scheduler.release(RequestId("a"))
    scheduler.add(make_request("b", num_prompt_tokens=14, salt=""), destination=None)
    plan, outputs = run(scheduler)
    assert [(c.start, c.num_tokens) for c in plan.chunks] == [(8, 6)]
    assert [output.num_cached for output in outputs] == [8]


def test_one_token_at_least_is_computed() -> None:
    scheduler = make_scheduler()
    for name in ("a", "b"):
        scheduler.add(make_request(name, num_prompt_tokens=8, salt=""), destination=None)
        plan, _ = run(scheduler)
    assert [(c.start, c.num_tokens) for c in plan.chunks] == [(4, 4)]


def test_a_prompt_whose_tokens_are_scored_is_computed_whole() -> None:
    scheduler = make_scheduler()
    for name in ("a", "b"):
        request = make_request(name, num_prompt_tokens=10, salt="", num_prompt_logprobs=0)
        scheduler.add(request, destination=None)
        plan, _ = run(scheduler)
        assert [(c.start, c.num_tokens) for c in plan.chunks] == [(0, 10)]


def test_chunks_can_be_shared_before_their_prompt_is_done() -> None:
    scheduler = make_scheduler(budget=8)
    scheduler.add(make_request("a", num_prompt_tokens=16, salt=""), destination=None)
    run(scheduler)
    scheduler.add(make_request("b", num_prompt_tokens=16, salt=""), destination=None)
    run(scheduler)
    plan, _ = run(scheduler)
    assert [(c.request.request_id, c.start) for c in plan.chunks] == [("b", 12)]


def test_the_same_prompt_twice_in_one_batch_is_kept_once() -> None:
    scheduler = make_scheduler()
    for name in ("a", "b"):
        scheduler.add(make_request(name, num_prompt_tokens=8, salt=""), destination=None)
    run(scheduler)
    for name in ("a", "b"):
        scheduler.release(RequestId(name))
        scheduler.check_invariants()
    assert (scheduler.pool.num_free, scheduler.pool.num_cached) == (64, 2)


def test_what_the_store_has_ready_is_loaded_and_what_follows_is_computed() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", num_prompt_tokens=14, salt=""), destination=None)
    scheduler.fetching(RequestId("a"))
    assert not run(scheduler)[0].chunks
    assert scheduler.is_idle
    scheduler.fetched(RequestId("a"), range(3))
    plan, _ = run(scheduler)
    assert [(c.loads, c.start, c.num_tokens) for c in plan.chunks] == [(range(3), 12, 2)]


def test_an_offer_that_begins_after_what_is_left_here_is_not_used() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", num_prompt_tokens=14, salt=""), destination=None)
    scheduler.fetching(RequestId("a"))
    scheduler.fetched(RequestId("a"), range(1, 3))
    plan, _ = run(scheduler)
    assert [(c.loads, c.start) for c in plan.chunks] == [(range(0), 0)]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_whatever_happens_every_block_comes_back_and_no_token_is_computed_twice(data: st.DataObject) -> None:
    scheduler = make_scheduler(num_blocks=12, budget=data.draw(st.integers(1, 20)), lookahead=16)
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=8))
    computed = {RequestId(f"r{i}"): 0 for i in range(len(lengths))}
    offers: dict[RequestId, int] = {}
    finished: set[str] = set()
    aborted: set[str] = set()
    for i, length in enumerate(lengths):
        destination = data.draw(st.sampled_from([None, DECODE, WorkerId("d1")]))
        salt = data.draw(st.sampled_from([None, "", "", "other"]))
        request = make_request(f"r{i}", num_prompt_tokens=length, salt=salt)
        scheduler.add(request, destination=destination)
        if salt is not None and data.draw(st.booleans()):
            scheduler.fetching(request.request_id)
            offers[request.request_id] = data.draw(st.integers(0, length // 4))
    for turn in range(400):
        for request_id in scheduler.wanted_tickets():
            scheduler.ticket(request_id)
        if offers and data.draw(st.booleans()):
            request_id, num_blocks = offers.popitem()
            scheduler.fetched(request_id, range(num_blocks))
        plan = scheduler.schedule()
        assert plan.num_tokens <= scheduler._max_batch_tokens
        victim = data.draw(st.sampled_from([None, None, None, *computed])) if turn < 40 else None
        if victim is not None and victim not in finished:
            scheduler.abort(victim)
            scheduler.release(victim)
            aborted.add(victim)
        for chunk in plan.chunks:
            begun = computed[chunk.request.request_id]
            is_first_after_hit = not begun and chunk.start % 4 == 0 and chunk.loads.stop * 4 in (0, chunk.start)
            assert chunk.start == begun or is_first_after_hit
            computed[chunk.request.request_id] = chunk.start + chunk.num_tokens
        for output in scheduler.commit(plan, [sampled(1) if c.is_last else [] for c in plan.chunks]):
            assert output.request_id not in finished | aborted
            finished.add(output.request_id)
            scheduler.release(output.request_id)
        scheduler.check_invariants()
        if not len(scheduler):
            break
    assert finished | aborted == set(computed)
    assert scheduler.pool.num_free == 12
