"""The decode scheduler: reservation, continuous batching, and blocks that always come back."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import given, settings

from decode_pool.plan import DecodeOutput, DecodePlan
from decode_pool.scheduler import DecodeScheduler
from tandem.kv.prefix_pool import PrefixPool
from tandem.types import FinishReason, RequestId
from tests.factories import make_first, make_prefix, make_request, sampled


def make_scheduler(*, num_blocks: int = 64, max_batch: int = 8, growth_tokens: int = 256) -> DecodeScheduler:
    return DecodeScheduler(
        PrefixPool(num_blocks), block_size=4, max_batch_sequences=max_batch, growth_tokens=growth_tokens
    )


def run(scheduler: DecodeScheduler, token: int = 7) -> tuple[DecodePlan, tuple[DecodeOutput, ...]]:
    plan = scheduler.schedule()
    outputs = scheduler.commit(plan, sampled(*[token] * len(plan.steps)))
    scheduler.check_invariants()
    return plan, outputs


def admit(scheduler: DecodeScheduler, name: str, **sampling: object) -> None:
    scheduler.add(make_request(name, **sampling))
    assert RequestId(name) in scheduler.reserve()
    scheduler.deliver(RequestId(name), make_first(5))


def test_a_sequence_decodes_from_its_first_token_to_max_tokens_and_frees_its_blocks() -> None:
    scheduler = make_scheduler()
    admit(scheduler, "a", max_tokens=4)
    steps, outputs = [], []
    while not scheduler.is_idle:
        plan, output = run(scheduler)
        steps += [(s.token_id, s.num_computed, s.output_position) for s in plan.steps]
        outputs += output
    assert steps == [(5, 5, 1), (7, 6, 2), (7, 7, 3)]
    assert [o.step.finish_reason for o in outputs] == [None, None, FinishReason.LENGTH]
    assert scheduler.pool.num_free == 64


def test_sequences_join_and_leave_at_every_iteration() -> None:
    scheduler = make_scheduler()
    admit(scheduler, "a", max_tokens=3)
    run(scheduler)
    admit(scheduler, "b", max_tokens=3)
    assert [s.request.request_id for s in run(scheduler)[0].steps] == ["a", "b"]
    assert [s.request.request_id for s in run(scheduler)[0].steps] == ["b"]
    assert scheduler.is_idle


def test_offers_wait_in_order_while_blocks_are_out() -> None:
    scheduler = make_scheduler(num_blocks=4)
    admit(scheduler, "a", max_tokens=4)
    scheduler.add(make_request("b", num_prompt_tokens=12))
    scheduler.add(make_request("c", num_prompt_tokens=2, max_tokens=2))
    assert scheduler.reserve() == ()
    while not scheduler.is_idle:
        run(scheduler)
    assert scheduler.reserve() == (RequestId("b"),)


def test_many_requests_that_may_become_long_run_together_while_they_are_short() -> None:
    scheduler = make_scheduler(num_blocks=80, growth_tokens=4)
    for i in range(8):
        admit(scheduler, f"r{i}", max_tokens=200)
    assert len(run(scheduler)[0].steps) == 8


def test_when_all_become_long_some_wait_and_all_finish() -> None:
    scheduler = make_scheduler(num_blocks=80, growth_tokens=4)
    for i in range(8):
        admit(scheduler, f"r{i}", max_tokens=200)
    finished, paused = 0, False
    while not scheduler.is_idle:
        plan, outputs = run(scheduler)
        assert plan.steps
        paused = paused or len(plan.steps) < scheduler.num_running
        finished += sum(output.step.finish_reason is not None for output in outputs)
    assert paused
    assert finished == 8
    assert scheduler.pool.num_free == 80


def test_the_batch_is_capped_and_the_rest_waits_for_its_turn() -> None:
    scheduler = make_scheduler(max_batch=2)
    for name in ("a", "b", "c"):
        admit(scheduler, name, max_tokens=2)
    assert [s.request.request_id for s in run(scheduler)[0].steps] == ["a", "b"]
    assert [s.request.request_id for s in run(scheduler)[0].steps] == ["c"]


def test_a_batch_full_of_sequences_without_blocks_lets_those_behind_end_and_give_theirs_back() -> None:
    scheduler = make_scheduler(num_blocks=6, max_batch=1, growth_tokens=4)
    admit(scheduler, "long", max_tokens=20)
    admit(scheduler, "short", max_tokens=4)
    order = []
    while not scheduler.is_idle:
        plan, _ = run(scheduler)
        assert plan.steps, "nobody can go on"
        order += [step.request.request_id for step in plan.steps]
    assert order.index("short") < order.index("long") + 19
    assert (order.count("long"), order.count("short")) == (19, 3)


def test_blocks_of_a_handoff_are_not_freed_by_abort() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a"))
    scheduler.reserve()
    assert not scheduler.abort(RequestId("a"))
    assert scheduler.pool.num_free < 64
    scheduler.release(RequestId("a"))
    assert scheduler.pool.num_free == 64


def test_blocks_that_a_running_iteration_writes_are_freed_only_when_it_is_committed() -> None:
    scheduler = make_scheduler()
    admit(scheduler, "a")
    plan = scheduler.schedule()
    assert scheduler.abort(RequestId("a"))
    assert scheduler.pool.num_free < 64
    assert scheduler.commit(plan, sampled(7)) == ()
    assert scheduler.pool.num_free == 64


def test_choices_share_the_prompts_blocks_and_copy_its_last_one_when_they_write() -> None:
    scheduler = make_scheduler(growth_tokens=4)
    scheduler.add(make_request("a", num_prompt_tokens=6, num_choices=3, max_tokens=3))
    scheduler.reserve()
    first, last = scheduler.reservation(RequestId("a")).block_ids
    scheduler.deliver(RequestId("a"), make_first(5, 6, 7))
    plan = scheduler.schedule()
    assert [(s.choice, s.token_id, s.num_computed, s.output_position) for s in plan.steps] == [
        (0, 5, 6, 1),
        (1, 6, 6, 1),
        (2, 7, 6, 1),
    ]
    assert [copy.source for copy in plan.copies] == [last, last]
    assert {s.block_ids[0] for s in plan.steps} == {first}
    assert [s.block_ids[1] for s in plan.steps] == [*(copy.destination for copy in plan.copies), last]
    scheduler.commit(plan, sampled(7, 7, 7))
    plan = scheduler.schedule()
    assert plan.copies == ()
    outputs = scheduler.commit(plan, sampled(7, 7, 7))
    assert [o.is_last for o in outputs] == [False, False, True]
    assert scheduler.pool.num_free == 64


def test_a_prompt_that_fills_its_blocks_is_never_copied() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", num_prompt_tokens=8, num_choices=2, max_tokens=9))
    scheduler.reserve()
    scheduler.deliver(RequestId("a"), make_first(5, 6))
    while not scheduler.is_idle:
        assert run(scheduler)[0].copies == ()


def test_choices_that_ended_with_their_first_token_are_not_decoded() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", num_choices=3))
    scheduler.reserve()
    scheduler.deliver(RequestId("a"), make_first(5, 6, 7, finish_reasons={1: FinishReason.STOP}))
    assert [s.choice for s in run(scheduler)[0].steps] == [0, 2]


def test_a_choice_that_ends_early_frees_its_own_blocks_only_and_the_last_one_the_rest() -> None:
    scheduler = make_scheduler(growth_tokens=1)
    scheduler.add(make_request("a", num_prompt_tokens=6, num_choices=2, max_tokens=30))
    scheduler.reserve()
    scheduler.deliver(RequestId("a"), make_first(5, 6))
    run(scheduler)
    assert not scheduler.end_choice(RequestId("a"), 0)
    scheduler.check_invariants()
    plan, _ = run(scheduler)
    assert [s.choice for s in plan.steps] == [1]
    assert scheduler.end_choice(RequestId("a"), 1)
    assert scheduler.pool.num_free == 64


def test_a_block_that_is_being_copied_is_not_freed_by_the_end_of_the_choice_that_waits() -> None:
    scheduler = make_scheduler(max_batch=1)
    scheduler.add(make_request("a", num_prompt_tokens=6, num_choices=2))
    scheduler.reserve()
    _, last = scheduler.reservation(RequestId("a")).block_ids
    scheduler.deliver(RequestId("a"), make_first(5, 6))
    plan = scheduler.schedule()
    assert [(s.choice, c.source) for s, c in zip(plan.steps, plan.copies, strict=True)] == [(0, last)]
    assert not scheduler.end_choice(RequestId("a"), 1)
    assert scheduler.pool.num_references(last) == 1
    scheduler.commit(plan, sampled(7))
    assert scheduler.pool.num_references(last) == 0
    scheduler.check_invariants()


def test_a_prompt_that_is_here_needs_only_its_last_tokens_and_shares_the_rest() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", num_prompt_tokens=10, salt=""))
    scheduler.reserve()
    first = scheduler.reservation(RequestId("a"))
    assert (len(first.block_ids), first.num_found) == (3, 0)
    scheduler.deliver(RequestId("a"), make_first(5))
    scheduler.add(make_request("b", num_prompt_tokens=9, salt=""))
    scheduler.reserve()
    second = scheduler.reservation(RequestId("b"))
    assert second.block_ids[:2] == first.block_ids[:2]
    assert second.num_found == 2
    scheduler.check_invariants()


def test_another_salt_shares_nothing() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", num_prompt_tokens=10, salt=""))
    scheduler.reserve()
    scheduler.deliver(RequestId("a"), make_first(5))
    scheduler.add(make_request("b", num_prompt_tokens=10, salt="other"))
    scheduler.reserve()
    assert scheduler.reservation(RequestId("b")).num_found == 0


def test_a_prompt_that_is_still_moving_is_not_found() -> None:
    scheduler = make_scheduler()
    for name in ("a", "b"):
        scheduler.add(make_request(name, num_prompt_tokens=10, salt=""))
    scheduler.reserve()
    assert scheduler.reservation(RequestId("b")).num_found == 0


def test_what_arrived_twice_is_kept_once() -> None:
    scheduler = make_scheduler()
    for name in ("a", "b"):
        scheduler.add(make_request(name, num_prompt_tokens=10, max_tokens=2, salt=""))
    scheduler.reserve()
    for name in ("a", "b"):
        scheduler.deliver(RequestId(name), make_first(5))
        scheduler.check_invariants()
    assert scheduler.pool.num_free == 64 - 2 - 2


def test_the_next_turn_finds_prompt_and_output() -> None:
    scheduler = make_scheduler()
    admit(scheduler, "a", max_tokens=10, num_prompt_tokens=6, salt="")
    while not scheduler.is_idle:
        run(scheduler, token=7)
    tokens = (0, 1, 2, 3, 4, 5, 5, *[7] * 9, 8, 8)
    request = replace(make_request("b", salt=""), prompt_token_ids=tokens, prefix=make_prefix(tokens))
    scheduler.add(request)
    scheduler.reserve()
    assert scheduler.reservation(RequestId("b")).num_found == 3, "the newest token's KV was never written"


def test_a_pool_full_of_prefixes_still_takes_whatever_fits() -> None:
    scheduler = make_scheduler(num_blocks=4)
    admit(scheduler, "a", num_prompt_tokens=12, max_tokens=2, salt="")
    run(scheduler)
    assert scheduler.pool.num_cached == 3
    admit(scheduler, "b", num_prompt_tokens=13, max_tokens=2, salt="other")
    run(scheduler)
    assert scheduler.pool.num_free == 4


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_whatever_happens_every_block_comes_back_and_nobody_is_forgotten(data: st.DataObject) -> None:
    growth_tokens = data.draw(st.sampled_from([1, 4, 8, 256]))
    scheduler = make_scheduler(num_blocks=14, max_batch=data.draw(st.integers(1, 4)), growth_tokens=growth_tokens)
    names = [RequestId(f"r{i}") for i in range(data.draw(st.integers(1, 8)))]
    left: dict[RequestId, set[int]] = {}
    """Choices that have not ended."""
    for name in names:
        left[name] = set(range(data.draw(st.integers(1, 3))))
        scheduler.add(
            make_request(
                name,
                num_prompt_tokens=data.draw(st.integers(1, 20)),
                max_tokens=data.draw(st.integers(2, 8)),
                stop_token_ids=(1,),
                num_choices=len(left[name]),
                salt=data.draw(st.sampled_from([None, "", "", "other"])),
            )
        )
    moving: list[RequestId] = []
    delivered: set[RequestId] = set()
    for turn in range(800):
        is_wild = turn < 40
        moving += scheduler.reserve()
        if moving and (not is_wild or data.draw(st.booleans())):
            delivered.add(moving[0])
            scheduler.deliver(moving[0], make_first(*[0] * len(left[moving[0]])))
            moving.pop(0)
        plan = scheduler.schedule()
        victim = data.draw(st.sampled_from([None, None, None, *names])) if is_wild else None
        if victim is not None and left[victim]:
            choice = data.draw(st.sampled_from(sorted(left[victim])))
            if victim in delivered and data.draw(st.booleans()):
                left[victim].remove(choice)
                assert scheduler.end_choice(victim, choice) == (not left[victim])
            else:
                left[victim].clear()
                if not scheduler.abort(victim):
                    moving.remove(victim)
                    scheduler.release(victim)
        tokens = [data.draw(st.integers(0, 3)) if is_wild else 2 for _ in plan.steps]
        for output in scheduler.commit(plan, sampled(*tokens)):
            assert output.step.choice in left[output.request_id]
            if output.step.finish_reason is not None:
                left[output.request_id].remove(output.step.choice)
            assert output.is_last == (not left[output.request_id])
        scheduler.check_invariants()
        if not len(scheduler):
            break
    assert not any(left.values())
    assert scheduler.pool.num_free == 14
