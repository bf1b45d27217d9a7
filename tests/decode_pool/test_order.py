"""The order of requests in decode: arrival and priority, and that nobody starves."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from decode_pool.scheduler import DecodeScheduler
from tandem.kv.prefix_pool import PrefixPool
from tandem.types import PRIORITY_S, RequestId
from tests.factories import make_first, make_request, sampled


def make_scheduler(*, num_blocks: int, max_batch: int = 8) -> DecodeScheduler:
    return DecodeScheduler(PrefixPool(num_blocks), block_size=4, max_batch_sequences=max_batch, growth_tokens=4)


def run(scheduler: DecodeScheduler) -> list[str]:
    """One iteration; whose tokens it computed."""
    plan = scheduler.schedule()
    scheduler.commit(plan, sampled(*[7] * len(plan.steps)))
    scheduler.check_invariants()
    return [step.request.request_id for step in plan.steps]


def take(scheduler: DecodeScheduler) -> list[RequestId]:
    """Reserves, and has the KV arrive at once."""
    reserved = list(scheduler.reserve())
    for request_id in reserved:
        scheduler.deliver(request_id, make_first(5))
    return reserved


def add(scheduler: DecodeScheduler, name: str, *, arrival_s: float, priority: int = 0, max_tokens: int = 4) -> None:
    scheduler.add(make_request(name, arrival_s=arrival_s, priority=priority, max_tokens=max_tokens))


def test_offers_get_blocks_by_arrival_where_a_level_of_priority_is_worth_seconds() -> None:
    scheduler = make_scheduler(num_blocks=2)
    add(scheduler, "runs", arrival_s=0.0)
    take(scheduler)
    add(scheduler, "first", arrival_s=0.0)
    add(scheduler, "urgent", arrival_s=PRIORITY_S - 0.1, priority=-1)
    add(scheduler, "late", arrival_s=2 * PRIORITY_S, priority=-1)
    served = []
    while len(scheduler):
        run(scheduler)
        served += take(scheduler)
    assert served == ["urgent", "first", "late"]


def test_a_batch_that_is_full_takes_the_first_in_order_next() -> None:
    scheduler = make_scheduler(num_blocks=64, max_batch=1)
    for name, priority in (("runs", 0), ("patient", 2), ("plain", 0), ("urgent", -2)):
        add(scheduler, name, arrival_s=0.0, priority=priority, max_tokens=2)
        take(scheduler)
        if name == "runs":
            assert run(scheduler) == ["runs"]
    assert [run(scheduler) for _ in range(3)] == [["urgent"], ["plain"], ["patient"]]


def test_a_sequence_that_waits_for_a_block_is_not_overtaken_by_newer_offers() -> None:
    scheduler = make_scheduler(num_blocks=10)
    for name in ("a", "b"):
        add(scheduler, name, arrival_s=0.0, max_tokens=30)
        take(scheduler)
    while len(run(scheduler)) == 2:
        pass
    add(scheduler, "newer", arrival_s=1.0)
    add(scheduler, "urgent", arrival_s=1.0, priority=-1, max_tokens=2)
    assert "newer" not in take(scheduler)
    order = []
    while len(scheduler):
        order += run(scheduler)
        take(scheduler)
    assert order.index("newer") > max(i for i, name in enumerate(order) if name == "a")


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_every_offer_is_reserved_and_every_sequence_ends_while_requests_keep_coming(data: st.DataObject) -> None:
    scheduler = make_scheduler(
        num_blocks=data.draw(st.integers(12, 20)), max_batch=data.draw(st.integers(1, 4))
    )
    watched = data.draw(st.integers(0, 5))
    first = data.draw(st.integers(1, 6))
    for i in range(first):
        add(scheduler, f"r{i}", arrival_s=0.0, max_tokens=data.draw(st.integers(2, 40)))
    late = f"watched{watched}"
    add(scheduler, late, arrival_s=0.0, priority=watched, max_tokens=data.draw(st.integers(2, 40)))
    for turn in range(600):
        if len(scheduler) < 16:
            tokens = data.draw(st.integers(2, 12)) if turn < 10 else 3
            add(scheduler, f"s{turn}", arrival_s=0.5 * turn, max_tokens=tokens)
        take(scheduler)
        run(scheduler)
        if late not in scheduler and not any(f"r{i}" in scheduler for i in range(first)):
            return
    raise AssertionError("starved")
