"""A pair gives the tokens of one engine for models of other families than Llama, for one choice and for several."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tandem.types import TokenStep
from tests.pair import Pair, PairOptions, driver_of, make_live_request, make_prompt, running_pair
from tests.tiny_families import WINDOW, save_tiny

SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 11}
REQUESTS: list[tuple[list[int], dict[str, Any]]] = [
    (make_prompt(5), {}),
    (make_prompt(3 * WINDOW), {}),
    (make_prompt(WINDOW - 2), {"num_choices": 2, **SAMPLED}),
    (make_prompt(2 * WINDOW + 3), {"num_choices": 2, **SAMPLED}),
]
"""Prompts of one chunk and of several; with the outputs, all but the first cross the window."""
MAX_TOKENS = WINDOW + 4


@pytest.fixture(scope="module", params=["gemma 2", "qwen 3", "qwen 3 moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("family"), request.param)


async def answer(pair: Pair, prompt: list[int], fields: dict[str, Any]) -> list[list[int]]:
    """The tokens of each choice."""
    dispatch = pair.dispatch(prompt, max_tokens=MAX_TOKENS, **fields)
    outputs: list[list[int]] = [[] for _ in range(fields.get("num_choices", 1))]
    try:
        async for step in dispatch:
            if isinstance(step, TokenStep):
                outputs[step.choice].append(step.token_id)
    finally:
        await dispatch.finish()
    return outputs


def test_a_pair_gives_the_tokens_of_one_engine_at_first_and_from_cached_prefixes(model: Path) -> None:
    async def twice() -> list[list[list[list[int]]]]:
        async with running_pair(model, PairOptions(prefill_blocks=96, decode_blocks=128)) as pair:
            first = await asyncio.gather(*(answer(pair, prompt, fields) for prompt, fields in REQUESTS))
            computed = pair.prefill.num_tokens
            again = await asyncio.gather(*(answer(pair, prompt, fields) for prompt, fields in REQUESTS))
            assert pair.prefill.num_tokens - computed < computed // 2, "no prefix was found"
            return [first, again]

    requests = [make_live_request(prompt, max_tokens=MAX_TOKENS, **fields) for prompt, fields in REQUESTS]
    alone = [[choice.token_ids for choice in each] for each in driver_of(model).answer(requests)]
    assert asyncio.run(twice()) == [alone, alone]
    assert alone[2][0] != alone[2][1]
