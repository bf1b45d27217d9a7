"""The order of prompts in a running prefill worker: who is overtaken gives the same tokens, a little later."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.pair import BLOCK_SIZE, CHUNK_TOKENS, make_prompt, monolithic, running_pair, until


def test_a_long_prompt_that_is_overtaken_between_its_chunks_gives_the_tokens_of_one_engine(gqa: Path) -> None:
    long, short = make_prompt(3 * CHUNK_TOKENS + 5), make_prompt(BLOCK_SIZE)

    async def beside() -> tuple[list[int], list[int], int]:
        async with running_pair(gqa) as pair:
            pair.prefill_executor.stop()
            overtaken = asyncio.create_task(pair.run(long, max_tokens=9))
            await until(pair.prefill_executor.stopped.is_set)
            overtaking = asyncio.create_task(pair.run(short, max_tokens=1))
            await until(lambda: len(pair.prefill.scheduler) == 2)
            pair.prefill_executor.go()
            tokens = await overtaken, await overtaking
            await pair.settled()
            return *tokens, pair.prefill.num_iterations

    outputs = asyncio.run(beside())
    in_one_more_iteration_than_the_long_one_alone = 4 + 1
    assert outputs == (
        monolithic(gqa, long, max_tokens=9),
        monolithic(gqa, short, max_tokens=1),
        in_one_more_iteration_than_the_long_one_alone,
    )
