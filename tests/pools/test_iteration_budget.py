"""How long a prefill worker's iterations get: never more than the budget, in tokens and by the measured speed."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import prefill_pool.worker
from tandem.model.executor import LayerHook, SequenceSlice, SliceOutput
from tests.hash_executor import SPEC, HashExecutor, expected
from tests.pair import Pair, PairOptions, make_prompt, running_pair, until

HASH = Path("hash")
SHORT_TOKENS = 60
HOUR_S = 3600.0
"""The clock runs ahead of the one that deadlines are given on."""


class Clock:
    """Stands still but for what iterations take."""

    def __init__(self) -> None:
        self.now_s = time.monotonic()

    def monotonic(self) -> float:
        return self.now_s


class Counted(HashExecutor):
    """Notes how many tokens of whom each iteration has, and lets each of them take `token_s` on the clock."""

    spec = replace(SPEC, max_context_tokens=8192)

    def __init__(self, *, num_blocks: int, allocate: Callable[[int], torch.Tensor], clock: Clock) -> None:
        super().__init__(num_blocks=num_blocks, allocate=allocate)
        self.clock = clock
        self.token_s = 0.01
        self.batches: list[list[int]] = []

    @property
    def num_tokens(self) -> list[int]:
        return [sum(batch) for batch in self.batches]

    def execute(
        self,
        batch: Sequence[SequenceSlice],
        on_layer: LayerHook | None = None,
        before_layer: LayerHook | None = None,
    ) -> list[SliceOutput]:
        self.batches.append([len(piece.token_ids) for piece in batch])
        self.clock.now_s += sum(self.batches[-1]) * self.token_s
        return super().execute(batch, on_layer, before_layer)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The prefill worker's."""
    clock = Clock()
    monkeypatch.setattr(
        prefill_pool.worker, "time", SimpleNamespace(monotonic=clock.monotonic, time=time.time)
    )
    return clock


def run_with(clock: Clock, use: Callable[[Pair, Counted], object], *, max_iteration_s: float = 0.0) -> None:
    """`use` is a coroutine function on a pair whose prefill worker's executor counts."""
    made: list[Counted] = []

    def make(*, num_blocks: int, allocate: Callable[[int], torch.Tensor]) -> Counted:
        made.append(Counted(num_blocks=num_blocks, allocate=allocate, clock=clock))
        return made[-1]

    options = PairOptions(
        make_executor=make,
        prefill_blocks=600,
        chunk_tokens=512,
        max_iteration_s=max_iteration_s,
    )

    async def run() -> None:
        async with running_pair(HASH, options) as pair:
            await use(pair, made[0])  # type: ignore[misc]

    asyncio.run(run())


def test_an_iteration_has_as_many_tokens_as_the_measured_speed_allows(clock: Clock) -> None:
    prompt = make_prompt(2000)

    async def use(pair: Pair, executor: Counted) -> None:
        assert await pair.run(prompt, max_tokens=1, timeout_s=HOUR_S) == expected(prompt, 1)
        unmeasured, *measured, rest = executor.num_tokens
        assert unmeasured == 512
        assert set(measured) == {50}
        assert rest <= 50
        assert sum(executor.num_tokens) == len(prompt)

    run_with(clock, use, max_iteration_s=0.505)


def test_a_worker_that_has_become_slower_takes_fewer_tokens(clock: Clock) -> None:
    async def use(pair: Pair, executor: Counted) -> None:
        await pair.run(make_prompt(800), max_tokens=1, timeout_s=HOUR_S)
        executor.batches.clear()
        executor.token_s *= 2
        await pair.run(make_prompt(800, seed=1), max_tokens=1, timeout_s=HOUR_S)
        first, *others = executor.num_tokens
        assert first == 50
        assert others[10:-1] == [25] * len(others[10:-1])
        assert all(later <= earlier for earlier, later in itertools.pairwise(others))

    run_with(clock, use, max_iteration_s=0.505)


def test_beside_a_prompt_of_4000_tokens_a_short_one_waits_for_no_more_than_one_budget(clock: Clock) -> None:
    long, shorts = make_prompt(4000), [make_prompt(SHORT_TOKENS, seed=seed) for seed in range(3)]

    async def use(pair: Pair, executor: Counted) -> None:
        stepped = pair.prefill_executor
        stepped.stop()
        running = asyncio.create_task(pair.run(long, max_tokens=1, timeout_s=HOUR_S))
        for short in shorts:
            await until(stepped.stopped.is_set)
            first = len(executor.batches)
            waiting = asyncio.create_task(pair.run(short, max_tokens=1, timeout_s=HOUR_S))
            await until(lambda: len(pair.prefill.scheduler) == 2)
            for _ in range(2):
                await until(stepped.stopped.is_set)
                stepped.stopped.clear()
                stepped.step()
            assert await waiting == expected(short, 1)
            waited = list(itertools.takewhile(lambda batch: SHORT_TOKENS not in batch, executor.batches[first:]))
            own = executor.batches[first + len(waited)]
            assert [len(batch) for batch in waited] == [1]
            assert sum(waited[0]) + sum(own) - SHORT_TOKENS <= 512
        stepped.go()
        assert await running == expected(long, 1)
        assert max(executor.num_tokens) == 512

    run_with(clock, use)
