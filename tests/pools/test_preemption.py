"""Preemption in running workers: who is swapped out and comes back gives the tokens of one that was left alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from router.dispatcher import LegDispatch
from tandem.errors import DeadlineExceeded, RequestCancelled, TandemError
from tandem.types import Role, TokenStep
from tests.hash_executor import HashExecutor, expected
from tests.pair import Pair, PairOptions, driver_of, make_live_request, make_prompt, running_pair, until
from tests.ranked import Shape, a_tracker, dispatched, ranked_worker
from tests.stepped_executor import SteppedExecutor

HASH = Path("hash")
OPTIONS = PairOptions(make_executor=HashExecutor, decode_blocks=30)
PATIENT, URGENT = make_prompt(43), make_prompt(70, seed=1)
NUM_TOKENS = 60
NUM_URGENT_TOKENS = 120
SWAPPED = "tandem_decode_swapped_blocks_total"


async def tokens_of(dispatch: LegDispatch) -> dict[int, list[int]]:
    """What each choice of a request gets."""
    tokens: dict[int, list[int]] = {}
    try:
        async for step in dispatch:
            if isinstance(step, TokenStep):
                tokens.setdefault(step.choice, []).append(step.token_id)
    finally:
        await dispatch.finish()
    return tokens


def count(pair: Pair, name: str, **labels: str) -> float:
    value = pair.decode.metrics.registry.get_sample_value(name, labels)
    assert value is not None
    return value


@asynccontextmanager
async def preempted(
    pair: Pair, *, timeout_s: float = 30.0, salt: str | None = None
) -> AsyncIterator[tuple[LegDispatch, LegDispatch]]:
    """A request that is in host memory, and the one that has its blocks, before that one's first iteration."""
    executor = pair.decode_executor
    executor.stop()
    patient = pair.dispatch(PATIENT, max_tokens=NUM_TOKENS, timeout_s=timeout_s, salt=salt)
    await until(executor.stopped.is_set)
    urgent = pair.dispatch(URGENT, max_tokens=NUM_URGENT_TOKENS, priority=-2)
    await until(lambda: pair.decode.scheduler.num_unreserved == 1)
    executor.step()
    await until(lambda: pair.decode.scheduler.num_swapped == 1 and executor.stopped.is_set())
    yield patient, urgent
    executor.go()
    assert await tokens_of(urgent) == {0: expected(URGENT, NUM_URGENT_TOKENS)}
    await pair.settled()


@pytest.mark.parametrize(("salt", "num_back"), [(None, 6), ("", 1)], ids=["alone", "prompt-still-here-by-name"])
def test_a_preempted_request_gives_the_tokens_of_one_alone_and_is_prefilled_once(
    salt: str | None, num_back: int
) -> None:
    async def run() -> None:
        async with running_pair(HASH, OPTIONS) as pair:
            async with preempted(pair, salt=salt) as (patient, _):
                pass
            assert await tokens_of(patient) == {0: expected(PATIENT, NUM_TOKENS)}
            assert pair.prefill.num_tokens == len(PATIENT) + len(URGENT)
            [out], [back] = pair.decode_executor.swapped_out, pair.decode_executor.swapped_in
            assert (len(out), len(back)) == (6, num_back)
            assert count(pair, "tandem_decode_preemptions_total") == 1
            assert (count(pair, SWAPPED, direction="out"), count(pair, SWAPPED, direction="in")) == (6, num_back)
            assert count(pair, "tandem_decode_swap_seconds_total", direction="out") > 0

    asyncio.run(run())


def test_without_host_memory_the_urgent_request_waits() -> None:
    options = PairOptions(make_executor=HashExecutor, decode_blocks=30, swap_blocks=0)

    async def run() -> None:
        async with running_pair(HASH, options) as pair:
            pair.decode_executor.stop()
            patient = pair.dispatch(PATIENT, max_tokens=NUM_TOKENS)
            await until(pair.decode_executor.stopped.is_set)
            urgent = pair.dispatch(URGENT, max_tokens=NUM_URGENT_TOKENS, priority=-9)
            await until(lambda: pair.decode.scheduler.num_unreserved == 1)
            pair.decode_executor.go()
            assert await tokens_of(patient) == {0: expected(PATIENT, NUM_TOKENS)}
            assert await tokens_of(urgent) == {0: expected(URGENT, NUM_URGENT_TOKENS)}
            assert pair.decode_executor.swapped_out == []

    asyncio.run(run())


def test_several_seeded_choices_go_on_where_they_were(gqa: Path) -> None:
    sampling = {"num_choices": 3, "temperature": 1.0, "seed": 5, "max_tokens": 12}
    [alone] = driver_of(gqa).answer([make_live_request(PATIENT, **sampling)])

    async def run() -> None:
        async with running_pair(gqa, PairOptions(decode_blocks=16)) as pair:
            executor = pair.decode_executor
            executor.stop()
            patient = asyncio.create_task(tokens_of(pair.dispatch(PATIENT, **sampling)))
            for _ in range(4):
                await until(executor.stopped.is_set)
                executor.stopped.clear()
                executor.step()
            urgent = pair.dispatch(URGENT, max_tokens=8, priority=-2)
            await until(lambda: pair.decode.scheduler.num_unreserved == 1)
            executor.go()
            await tokens_of(urgent)
            assert await patient == {choice: answer.token_ids for choice, answer in enumerate(alone)}
            assert len(executor.swapped_out) == len(executor.swapped_in) == 1

    asyncio.run(run())


async def cancel(pair: Pair, patient: LegDispatch) -> None:
    await patient.abort()


async def wait(pair: Pair, patient: LegDispatch) -> None:
    await until(lambda: pair.decode.scheduler.num_swapped == 0)


@pytest.mark.parametrize(
    ("end", "timeout_s", "error"), [(cancel, 30.0, RequestCancelled), (wait, 2.0, DeadlineExceeded)]
)
def test_a_request_that_ends_in_host_memory_leaves_nothing_there(
    end: Callable[[Pair, LegDispatch], Awaitable[None]], timeout_s: float, error: type[TandemError]
) -> None:
    async def run() -> None:
        async with running_pair(HASH, OPTIONS) as pair:
            async with preempted(pair, timeout_s=timeout_s) as (patient, _):
                await end(pair, patient)
                await until(lambda: not pair.num_swapped_blocks)
            if error is not RequestCancelled:
                with pytest.raises(error):
                    await tokens_of(patient)
            assert pair.decode_executor.swapped_in == []

    asyncio.run(run())


def test_a_worker_that_drains_lets_a_preempted_request_come_back_and_end() -> None:
    async def run() -> None:
        async with running_pair(HASH, OPTIONS) as pair:
            async with preempted(pair) as (patient, _):
                pair.decode.start_draining()
                drained = asyncio.create_task(pair.decode.wait_idle())
            assert await tokens_of(patient) == {0: expected(PATIENT, NUM_TOKENS)}
            await drained

    asyncio.run(run())


def test_every_rank_swaps_its_own_part(mha: Path) -> None:
    sampling = {"num_choices": 2, "temperature": 1.0, "seed": 5, "max_tokens": 40}
    [alone] = driver_of(mha).answer([make_live_request(PATIENT, **sampling)])

    async def run() -> None:
        async with (
            ranked_worker(mha, Role.PREFILL, Shape()) as prefill,
            ranked_worker(mha, Role.DECODE, Shape(tp=2, pp=2), num_blocks=24) as decode,
            a_tracker() as tracker,
        ):
            worker = decode.service.worker
            worker.executor = executor = SteppedExecutor(worker.executor)
            executor.stop()
            async with dispatched(prefill, decode, tracker, PATIENT, **sampling) as patient:
                await until(executor.stopped.is_set)
                async with dispatched(prefill, decode, tracker, URGENT, max_tokens=50, priority=-2) as urgent:
                    await until(lambda: worker.scheduler.num_unreserved == 1)
                    executor.go()
                    await tokens_of(urgent)
                assert await tokens_of(patient) == {choice: answer.token_ids for choice, answer in enumerate(alone)}
            assert len(executor.swapped_out) == len(executor.swapped_in) == 1

    asyncio.run(run())
