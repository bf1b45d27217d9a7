"""Workers cut in any way hand over to workers cut in any other: the tokens are those of one engine on one rank."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from router.tracker import WorkerTracker
from tandem.types import Role
from tests.pair import make_prompt, monolithic
from tests.ranked import RankedWorker, Shape, a_tracker, ranked_worker, run_on

PREFILL_SHAPES = [Shape(), Shape(tp=2), Shape(tp=4), Shape(pp=2), Shape(tp=2, pp=2)]
DECODE_SHAPES = [Shape(), Shape(tp=2), Shape(tp=4)]
SEEDED = {"temperature": 0.8, "top_p": 0.9, "seed": 7, "max_tokens": 9}
REQUESTS: list[tuple[list[int], dict[str, Any]]] = [
    (make_prompt(71), {"max_tokens": 9}),
    (make_prompt(20), SEEDED),
]

Use = Callable[[RankedWorker, RankedWorker, WorkerTracker], Awaitable[None]]


@pytest.mark.parametrize("model_name", ["gqa", "mha"])
def test_every_pair_of_shapes_gives_the_tokens_of_one_engine(request: pytest.FixtureRequest, model_name: str) -> None:
    model: Path = request.getfixturevalue(model_name)

    async def run() -> dict[str, list[list[int]]]:
        async with AsyncExitStack() as stack:
            enter = stack.enter_async_context
            prefills = [await enter(ranked_worker(model, Role.PREFILL, shape)) for shape in PREFILL_SHAPES]
            decodes = [await enter(ranked_worker(model, Role.DECODE, shape)) for shape in DECODE_SHAPES]
            tracker = await enter(a_tracker())
            return {
                f"{prefill.shape} to {decode.shape}": [
                    await run_on(prefill, decode, tracker, prompt, **sampling) for prompt, sampling in REQUESTS
                ]
                for prefill, decode in itertools.product(prefills, decodes)
            }

    expected = [monolithic(model, prompt, **sampling) for prompt, sampling in REQUESTS]
    outputs = asyncio.run(run())
    assert len(outputs) == len(PREFILL_SHAPES) * len(DECODE_SHAPES)
    assert {pair: tokens for pair, tokens in outputs.items() if tokens != expected} == {}


def on_pair(model: Path, prefill: Shape, decode: Shape, use: Use, **changes: Any) -> None:
    """`use` on two workers; all blocks must be free afterwards, and no rank may have failed."""

    async def run() -> None:
        async with (
            ranked_worker(model, Role.PREFILL, prefill, **changes) as source,
            ranked_worker(model, Role.DECODE, decode, **changes) as destination,
            a_tracker() as tracker,
        ):
            await use(source, destination, tracker)

    asyncio.run(run())
