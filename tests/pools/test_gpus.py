"""Pairs whose workers compute on GPUs: device memory goes from one to the other as it lies."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tandem.config import TransportName
from tests.gpus import need_gpus
from tests.pair import PairOptions, make_prompt, monolithic, running_pair

pytestmark = pytest.mark.gpu
LENGTHS = (1, 8, 31, 32, 71)


@pytest.mark.parametrize(("transport", "num_gpus"), [("ucx", 1), ("ucx", 2), ("auto", 1), ("collective", 2)])
def test_a_pair_on_gpus_gives_the_tokens_of_one_engine_on_the_cpu(
    gqa: Path, transport: TransportName, num_gpus: int
) -> None:
    gpus, prompts = need_gpus(num_gpus), [make_prompt(length) for length in LENGTHS]
    options = PairOptions(transport=transport, devices=(gpus[0], gpus[-1]))

    async def together() -> list[list[int]]:
        async with running_pair(gqa, options) as pair:
            return await asyncio.gather(*(pair.run(prompt, max_tokens=9) for prompt in prompts))

    assert asyncio.run(together()) == [monolithic(gqa, prompt, max_tokens=9) for prompt in prompts]


def test_what_was_started_on_a_gpu_leaves_blocks_whole_when_requests_are_cancelled(gqa: Path) -> None:
    gpus = need_gpus()

    async def scenario() -> None:
        async with running_pair(gqa, PairOptions(transport="ucx", devices=(gpus[0], gpus[0]))) as pair:
            dispatches = [pair.dispatch(make_prompt(60 + i), max_tokens=50) for i in range(6)]
            await asyncio.sleep(0)
            for dispatch in dispatches:
                await dispatch.abort()
            assert await pair.run(make_prompt(40), max_tokens=9) == monolithic(gqa, make_prompt(40), max_tokens=9)

    asyncio.run(scenario())
