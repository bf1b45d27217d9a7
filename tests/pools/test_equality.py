"""A pair gives the tokens that one engine gives, whatever the model, the lengths, the transport and the batch."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tandem.config import TransportName
from tests.legs import Legs
from tests.pair import BLOCK_SIZE, CHUNK_TOKENS, PairOptions, make_prompt, monolithic, running_pair

TRANSPORTS: list[TransportName] = ["shm", "ucx"]
LENGTHS = sorted(
    {1, 2}
    | {edge + delta for edge in (BLOCK_SIZE, CHUNK_TOKENS, 2 * CHUNK_TOKENS) for delta in (-1, 0, 1)}
    | {CHUNK_TOKENS + BLOCK_SIZE, 3 * CHUNK_TOKENS + 5}
)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("model_name", ["gqa", "mha"])
def test_prompts_of_all_lengths_together_give_the_tokens_of_one_engine(
    request: pytest.FixtureRequest, model_name: str, transport: TransportName
) -> None:
    model: Path = request.getfixturevalue(model_name)
    prompts = [make_prompt(length) for length in LENGTHS]

    async def together() -> list[list[int]]:
        async with running_pair(model, PairOptions(transport=transport)) as pair:
            return await asyncio.gather(*(pair.run(prompt, max_tokens=9) for prompt in prompts))

    assert asyncio.run(together()) == [monolithic(model, prompt, max_tokens=9) for prompt in prompts]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_seeded_requests_give_the_tokens_of_one_engine(gqa: Path, transport: TransportName) -> None:
    requests: list[tuple[list[int], dict[str, Any]]] = [
        (make_prompt(20 + seed), {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": seed, "max_tokens": 12})
        for seed in range(6)
    ]

    async def together() -> list[list[int]]:
        async with running_pair(gqa, PairOptions(transport=transport)) as pair:
            return await asyncio.gather(*(pair.run(prompt, **sampling) for prompt, sampling in requests))

    assert asyncio.run(together()) == [monolithic(gqa, prompt, **sampling) for prompt, sampling in requests]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_bfloat16_kv_gives_the_tokens_of_one_bfloat16_engine(gqa: Path, transport: TransportName) -> None:
    prompts = [make_prompt(length) for length in (5, 32, 71)]

    async def one_by_one() -> list[list[int]]:
        async with running_pair(gqa, PairOptions(transport=transport, dtype="bfloat16")) as pair:
            return [await pair.run(prompt, max_tokens=10) for prompt in prompts]

    outputs = asyncio.run(one_by_one())
    assert outputs == [monolithic(gqa, prompt, dtype="bfloat16", max_tokens=10) for prompt in prompts]


def test_one_token_needs_no_decode_worker(gqa: Path) -> None:
    prompt = make_prompt(40)

    async def one() -> tuple[list[int], int]:
        async with running_pair(gqa) as pair:
            return await pair.run(prompt, max_tokens=1), pair.decode.num_iterations

    assert asyncio.run(one()) == (monolithic(gqa, prompt, max_tokens=1), 0)


def test_a_stop_token_that_comes_first_ends_both_legs_and_nothing_is_decoded(gqa: Path) -> None:
    prompt = make_prompt(40)
    [first] = monolithic(gqa, prompt, max_tokens=1)

    async def ends() -> None:
        async with running_pair(gqa) as pair:
            assert await pair.run(prompt, max_tokens=9, stop_token_ids=(first,)) == [first]
            legs = await Legs(pair, prompt, max_tokens=9, stop_token_ids=(first,)).open()
            assert await legs.errors() == (None, None)
            assert [event.WhichOneof("event") for event in legs.decode.events] == ["accepted", "done"]
            assert [event.WhichOneof("event") for event in legs.prefill.events] == ["first_token", "done"]
            assert pair.decode.num_iterations == 0

    asyncio.run(ends())


def test_a_stop_token_in_the_middle_ends_the_output_there(gqa: Path) -> None:
    prompt = make_prompt(17)
    whole = monolithic(gqa, prompt, max_tokens=12)
    stop = next(token for token in whole[2:] if token not in whole[:2])

    async def ends() -> list[int]:
        async with running_pair(gqa) as pair:
            return await pair.run(prompt, max_tokens=12, stop_token_ids=(stop,))

    assert asyncio.run(ends()) == whole[: whole.index(stop) + 1]
