"""Preemption: who is swapped out for whom, that it comes back with all it had, and that nobody starves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from decode_pool.plan import DecodePlan
from decode_pool.scheduler import DecodeScheduler
from tandem.kv.prefix_pool import PrefixPool
from tandem.types import PRIORITY_S, Request, RequestId
from tests.block_memory import BlockMemory
from tests.factories import make_first, make_request, sampled

Draw = Callable[[st.SearchStrategy[Any]], Any]

BLOCK_SIZE = 4
NUM_BLOCKS = 14


def make_scheduler(
    *, num_blocks: int, num_slots: int = 16, growth_tokens: int = 4, max_batch: int = 8
) -> DecodeScheduler:
    return DecodeScheduler(
        PrefixPool(num_blocks),
        block_size=BLOCK_SIZE,
        max_batch_sequences=max_batch,
        growth_tokens=growth_tokens,
        num_swap_slots=num_slots,
    )


def run(scheduler: DecodeScheduler) -> DecodePlan:
    plan = scheduler.schedule()
    scheduler.commit(plan, sampled(*[7] * len(plan.steps)))
    scheduler.check_invariants()
    return plan


def start(scheduler: DecodeScheduler, name: str, *, first: tuple[int, ...] = (5,), **fields: object) -> None:
    scheduler.add(make_request(name, num_choices=len(first), **fields))
    assert scheduler.reserve() == (RequestId(name),)
    scheduler.deliver(RequestId(name), make_first(*first))


def names(plan: DecodePlan) -> list[str]:
    return [step.request.request_id for step in plan.steps]


def full_scheduler(**options: int) -> DecodeScheduler:
    """Three requests of a priority each hold all of 6 blocks, two each."""
    scheduler = make_scheduler(num_blocks=6, **options)
    for name, priority in (("plain", 0), ("patient", 2), ("urgent", -2)):
        start(scheduler, name, num_prompt_tokens=5, max_tokens=4, priority=priority)
    run(scheduler)
    assert scheduler.pool.num_free == 0
    return scheduler


def test_an_offer_a_level_before_others_gets_the_blocks_of_the_last_of_them() -> None:
    scheduler = full_scheduler()
    scheduler.add(make_request("first", num_prompt_tokens=5, max_tokens=4, priority=1))
    assert scheduler.reserve() == ()
    plan = run(scheduler)
    assert (plan.preempted, plan.steps) == (("patient",), ())
    assert scheduler.reserve() == (RequestId("first"),)
    assert scheduler.num_swapped == 1


@pytest.mark.parametrize(("arrival_s", "priority"), [(2 * PRIORITY_S + 0.1, 0), (0.1, 2), (0.1, 3)])
def test_less_than_a_level_takes_no_blocks(arrival_s: float, priority: int) -> None:
    scheduler = full_scheduler()
    scheduler.add(make_request("first", num_prompt_tokens=5, arrival_s=arrival_s, priority=priority))
    assert run(scheduler).preempted == ()


def test_as_few_are_taken_as_are_needed_and_nobody_where_all_would_not_be_enough() -> None:
    scheduler = full_scheduler()
    scheduler.add(make_request("large", num_prompt_tokens=13, max_tokens=4, priority=-1))
    assert run(scheduler).preempted == ("patient", "plain")
    scheduler = full_scheduler()
    scheduler.add(make_request("huge", num_prompt_tokens=21, max_tokens=4, priority=-1))
    assert run(scheduler).preempted == ()


def test_without_room_in_host_memory_an_offer_waits() -> None:
    for num_slots in (0, 1):
        scheduler = full_scheduler(num_slots=num_slots)
        scheduler.add(make_request("first", num_prompt_tokens=5, max_tokens=4, priority=-9))
        assert run(scheduler).preempted == ()


def test_blocks_are_given_to_others_only_once_they_have_been_copied() -> None:
    scheduler = full_scheduler()
    scheduler.add(make_request("first", num_prompt_tokens=5, max_tokens=4, priority=-9))
    plan = scheduler.schedule()
    assert plan.preempted == ("patient",)
    assert scheduler.reserve() == ()
    assert scheduler.pool.num_free == 0
    scheduler.check_invariants()
    scheduler.commit(plan, [])
    assert scheduler.reserve() == (RequestId("first"),)


def test_a_sequence_that_waits_for_a_block_gets_one_of_those_behind_it() -> None:
    scheduler = make_scheduler(num_blocks=14)
    start(scheduler, "behind", max_tokens=40, priority=1)
    for _ in range(30):
        run(scheduler)
    start(scheduler, "first", max_tokens=20)
    plans = [run(scheduler) for _ in range(10)]
    assert [plan.preempted for plan in plans if plan.preempted] == [("behind",)]
    assert [len(plan.steps) for plan in plans] == [*[2] * 7, 1, 0, 1]
    assert (names(plans[7]), names(plans[9])) == (["behind"], ["first"])


def test_a_swapped_request_goes_on_with_the_token_it_had_when_there_is_room_again() -> None:
    scheduler = full_scheduler()
    scheduler.add(make_request("first", num_prompt_tokens=5, max_tokens=4, priority=-9))
    out = run(scheduler)
    assert scheduler.reserve() == (RequestId("first"),)
    scheduler.abort(RequestId("plain"))
    plan = run(scheduler)
    assert names(plan) == ["urgent", "patient"]
    assert plan.admitted == ()
    assert (plan.steps[1].output_position, plan.steps[1].num_computed) == (2, 6)
    assert [swap.slot for swap in plan.ins] == [swap.slot for swap in out.outs]
    assert plan.steps[1].block_ids == tuple(swap.block for swap in plan.ins)
    assert scheduler.swap_space.num_free == scheduler.swap_space.num_slots


def test_no_offer_overtakes_a_swapped_request_that_stands_before_it() -> None:
    scheduler = full_scheduler()
    scheduler.add(make_request("first", num_prompt_tokens=5, max_tokens=4, priority=-9))
    run(scheduler)
    assert scheduler.reserve() == (RequestId("first"),)
    scheduler.add(make_request("later", num_prompt_tokens=1, max_tokens=2, priority=3))
    scheduler.abort(RequestId("plain"))
    assert scheduler.reserve() == ()
    assert names(run(scheduler)) == ["urgent", "patient"]


def test_choices_share_blocks_again_when_they_come_back() -> None:
    scheduler = make_scheduler(num_blocks=12)
    start(scheduler, "several", first=(5, 6, 7), num_prompt_tokens=9, max_tokens=3)
    run(scheduler)
    before = {s.choice: s.block_ids for s in scheduler.schedule().steps}
    scheduler = make_scheduler(num_blocks=12)
    start(scheduler, "several", first=(5, 6, 7), num_prompt_tokens=9, max_tokens=3)
    run(scheduler)
    scheduler.add(make_request("first", num_prompt_tokens=30, max_tokens=4, priority=-9))
    out = run(scheduler)
    assert len(out.outs) == len({block for table in before.values() for block in table})
    scheduler.reserve()
    scheduler.release(RequestId("first"))
    plan = run(scheduler)
    after = {s.choice: s.block_ids for s in plan.steps}
    assert [len(set(column)) for column in zip(*after.values(), strict=True)] == [1, 1, 3]
    assert len(plan.ins) == len(out.outs)


def test_what_is_still_here_by_name_is_not_copied_back() -> None:
    scheduler = make_scheduler(num_blocks=8)
    start(scheduler, "named", num_prompt_tokens=13, max_tokens=4, salt="")
    run(scheduler)
    scheduler.add(make_request("first", num_prompt_tokens=18, max_tokens=4, priority=-9))
    assert len(run(scheduler).outs) == 4
    assert scheduler.reserve() == (RequestId("first"),)
    scheduler.release(RequestId("first"))
    assert len(run(scheduler).ins) < 4


def test_a_prompt_that_several_share_lies_in_host_memory_once() -> None:
    scheduler = make_scheduler(num_blocks=8)
    for name in ("one", "other"):
        start(scheduler, name, num_prompt_tokens=9, max_tokens=4, salt="")
    run(scheduler)
    scheduler.add(make_request("first", num_prompt_tokens=25, max_tokens=4, priority=-9))
    plan = run(scheduler)
    assert plan.preempted == ("one", "other")
    assert len(plan.outs) == 4
    assert scheduler.swap_space.num_slots - scheduler.swap_space.num_free == 4


def test_a_choice_and_a_request_that_end_while_swapped_leave_nothing_in_host_memory() -> None:
    scheduler = make_scheduler(num_blocks=8)
    start(scheduler, "several", first=(5, 6), num_prompt_tokens=5, max_tokens=8)
    run(scheduler)
    scheduler.add(make_request("first", num_prompt_tokens=25, max_tokens=4, priority=-9))
    plan = scheduler.schedule()
    assert plan.preempted == ("several",)
    assert not scheduler.end_choice(RequestId("several"), 0)
    scheduler.commit(plan, [])
    scheduler.check_invariants()
    assert scheduler.swap_space.num_slots - scheduler.swap_space.num_free == 2
    assert scheduler.end_choice(RequestId("several"), 1)
    scheduler.check_invariants()
    assert scheduler.swap_space.num_free == scheduler.swap_space.num_slots


def test_a_request_that_is_ended_while_it_is_copied_back_keeps_its_blocks_until_that_is_done() -> None:
    scheduler = full_scheduler()
    scheduler.add(make_request("first", num_prompt_tokens=5, max_tokens=4, priority=-9))
    run(scheduler)
    scheduler.reserve()
    scheduler.abort(RequestId("plain"))
    plan = scheduler.schedule()
    assert plan.ins
    scheduler.abort(RequestId("patient"))
    assert all(scheduler.pool.num_references(swap.block) for swap in plan.ins)
    scheduler.commit(plan, sampled(*[7] * len(plan.steps)))
    scheduler.check_invariants()
    assert not any(scheduler.pool.num_references(swap.block) for swap in plan.ins)


def test_a_request_that_is_overtaken_again_and_again_ends_when_its_waiting_has_made_up_for_it() -> None:
    scheduler = make_scheduler(num_blocks=4)
    start(scheduler, "patient", max_tokens=9, priority=2)
    preemptions = 0
    for turn in range(200):
        if len(scheduler) < 3:
            request = make_request(f"r{turn}", num_prompt_tokens=9, max_tokens=4, arrival_s=0.5 * turn)
            scheduler.add(request)
        for request_id in scheduler.reserve():
            scheduler.deliver(request_id, make_first(5))
        preemptions += len(run(scheduler).preempted)
        if RequestId("patient") not in scheduler:
            assert preemptions
            return
    raise AssertionError("starved")


class Worker:
    """A decode worker's events in any order, with what lies in its memory."""

    def __init__(self, scheduler: DecodeScheduler) -> None:
        self.scheduler = scheduler
        self.now = 0.0
        self.requests: dict[RequestId, Request] = {}
        self.left: dict[RequestId, set[int]] = {}
        """Choices that have not ended."""
        self.moving: list[RequestId] = []
        self.delivered: set[RequestId] = set()
        self.plan: DecodePlan | None = None
        self.memory = BlockMemory(BLOCK_SIZE)
        self.num_preempted = 0

    def offer(self, draw: Draw) -> None:
        self.now += draw(st.sampled_from([0.0, 0.0, 1.0, 6.0]))
        name, num_choices = f"r{len(self.requests)}", draw(st.sampled_from([1, 1, 2, 3]))
        request = make_request(
            name,
            num_prompt_tokens=draw(st.integers(1, 20)),
            max_tokens=draw(st.integers(2, 16)),
            num_choices=num_choices,
            salt=draw(st.sampled_from([None, "", "", "other"])),
            stop_token_ids=(1,),
            arrival_s=self.now,
            priority=draw(st.integers(-3, 3)),
        )
        if self.scheduler.num_blocks_for(request) <= NUM_BLOCKS:
            self.requests[request.request_id] = request
            self.left[request.request_id] = set(range(num_choices))
            self.scheduler.add(request)

    def reserve(self) -> None:
        for request_id in self.scheduler.reserve():
            self.memory.receive(self.requests[request_id], self.scheduler.reservation(request_id))
            self.moving.append(request_id)

    def deliver(self, request_id: RequestId) -> None:
        self.moving.remove(request_id)
        self.delivered.add(request_id)
        request = self.requests[request_id]
        for choice in range(request.num_choices):
            self.memory.history[request_id, choice] = [*request.prompt_token_ids, 0]
        self.scheduler.deliver(request_id, make_first(*[0] * request.num_choices))

    def end(self, draw: Draw) -> None:
        live = [request_id for request_id, choices in self.left.items() if choices]
        if not live:
            return
        request_id = draw(st.sampled_from(live))
        if request_id in self.delivered and draw(st.booleans()):
            choice = draw(st.sampled_from(sorted(self.left[request_id])))
            self.left[request_id].remove(choice)
            assert self.scheduler.end_choice(request_id, choice) == (not self.left[request_id])
            return
        self.left[request_id].clear()
        if not self.scheduler.abort(request_id):
            self.moving.remove(request_id)
            self.scheduler.release(request_id)

    def schedule(self) -> None:
        first_s = min((r.order_s for name, r in self.requests.items() if self.left[name]), default=0.0)
        self.plan = self.scheduler.schedule()
        for name in self.plan.preempted:
            assert name in self.delivered
            assert first_s + PRIORITY_S <= self.requests[name].order_s
        self.num_preempted += len(self.plan.preempted)

    def execute(self, tokens: list[int]) -> None:
        assert self.plan is not None
        self.memory.run(self.plan)
        for output in self.scheduler.commit(self.plan, sampled(*tokens)):
            assert output.step.choice in self.left[output.request_id]
            self.memory.history[output.request_id, output.step.choice].append(output.step.token_id)
            if output.step.finish_reason is not None:
                self.left[output.request_id].remove(output.step.choice)
            assert output.is_last == (not self.left[output.request_id])

    def turn(self, draw: Draw) -> None:
        """An iteration, and what may happen before it and while it runs."""
        if draw(st.integers(0, 2)) == 0:
            self.offer(draw)
        for _ in range(2):
            if draw(st.booleans()):
                self.reserve()
            if self.moving and draw(st.booleans()):
                self.deliver(draw(st.sampled_from(self.moving)))
            if draw(st.integers(0, 9)) == 0:
                self.end(draw)
            self.scheduler.check_invariants()
            if self.plan is None:
                self.schedule()
        assert self.plan is not None
        self.execute([draw(st.sampled_from([0, 2, 2, 3, 3, 3, 1])) for _ in self.plan.steps])
        self.plan = None

    def finish(self) -> None:
        """Whatever is left ends by itself: nobody is forgotten, and nothing is kept in either memory."""
        for _ in range(1000):
            self.reserve()
            for request_id in tuple(self.moving):
                self.deliver(request_id)
            self.schedule()
            assert self.plan is not None
            self.execute([2] * len(self.plan.steps))
            self.scheduler.check_invariants()
            if not len(self.scheduler):
                break
        assert not any(self.left.values())
        assert self.scheduler.pool.num_free == NUM_BLOCKS
        assert self.scheduler.swap_space.num_free == self.scheduler.swap_space.num_slots


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_whatever_happens_all_end_with_their_own_kv_and_nothing_is_left_in_either_memory(data: st.DataObject) -> None:
    worker = Worker(
        make_scheduler(
            num_blocks=NUM_BLOCKS,
            num_slots=data.draw(st.sampled_from([3, 8, 40, 40])),
            growth_tokens=data.draw(st.sampled_from([1, 4, 8, 256])),
            max_batch=data.draw(st.integers(1, 4)),
        )
    )
    for _ in range(40):
        worker.turn(data.draw)
    worker.finish()
