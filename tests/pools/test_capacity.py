"""More requests than either pool can hold: they wait their turn, and what can never fit is refused at once."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest

from tandem.config import TransportName
from tandem.errors import ContextLengthExceeded, InvalidRequest, TandemError
from tests.legs import Legs
from tests.pair import BLOCK_SIZE, PairOptions, make_prompt, monolithic, running_pair

TRANSPORTS: list[TransportName] = ["shm", "ucx"]
PROMPTS = [make_prompt(40, seed=seed) for seed in range(9)]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("prefill_blocks", "decode_blocks"), [(64, 13), (11, 64), (5, 6)])
def test_requests_beyond_the_blocks_wait_and_all_finish_with_the_right_tokens(
    gqa: Path, transport: TransportName, prefill_blocks: int, decode_blocks: int
) -> None:
    options = PairOptions(transport=transport, prefill_blocks=prefill_blocks, decode_blocks=decode_blocks)

    async def crowd() -> list[list[int]]:
        async with running_pair(gqa, options) as pair:
            return await asyncio.gather(*(pair.run(prompt, max_tokens=9) for prompt in PROMPTS))

    assert asyncio.run(crowd()) == [monolithic(gqa, prompt, max_tokens=9) for prompt in PROMPTS]


def test_requests_that_wait_for_blocks_longer_than_a_lease_are_not_given_up(gqa: Path) -> None:
    options = PairOptions(decode_blocks=6, lease_s=1.0)

    async def crowd() -> list[list[int]]:
        async with running_pair(gqa, options) as pair:
            pair.decode_executor.stop()
            requests = [asyncio.create_task(pair.run(prompt, max_tokens=9)) for prompt in PROMPTS[:3]]
            await asyncio.to_thread(pair.decode_executor.stopped.wait)
            await asyncio.sleep(2 * options.lease_s)
            pair.decode_executor.go()
            return await asyncio.gather(*requests)

    assert asyncio.run(crowd()) == [monolithic(gqa, prompt, max_tokens=9) for prompt in PROMPTS[:3]]


def test_requests_are_served_in_the_order_of_their_coming(gqa: Path) -> None:
    async def crowd() -> list[int]:
        order: list[int] = []

        def note(number: int, _: object) -> None:
            order.append(number)

        async with running_pair(gqa, PairOptions(decode_blocks=6, prefill_blocks=5)) as pair:
            legs = []
            for number, prompt in enumerate(PROMPTS[:5]):
                legs.append(await Legs(pair, prompt, max_tokens=9).open())
                legs[-1].decode.task.add_done_callback(partial(note, number))
            assert [await leg.errors() for leg in legs] == [(None, None)] * 5
        return order

    assert asyncio.run(crowd()) == [0, 1, 2, 3, 4]


def test_fewer_places_in_the_batch_than_requests_change_no_token(gqa: Path) -> None:
    async def crowd() -> list[list[int]]:
        async with running_pair(gqa, PairOptions(max_batch_sequences=2)) as pair:
            return await asyncio.gather(*(pair.run(prompt, max_tokens=9) for prompt in PROMPTS))

    assert asyncio.run(crowd()) == [monolithic(gqa, prompt, max_tokens=9) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("options", "num_prompt_tokens", "max_tokens", "error"),
    [
        (PairOptions(decode_blocks=6), 40, 10, ContextLengthExceeded),
        (PairOptions(prefill_blocks=4), 33, 4, ContextLengthExceeded),
        (PairOptions(prefill_blocks=4), 33, 1, ContextLengthExceeded),
    ],
)
def test_what_can_never_fit_is_refused_and_the_next_request_runs(
    gqa: Path, options: PairOptions, num_prompt_tokens: int, max_tokens: int, error: type[TandemError]
) -> None:
    async def refused() -> None:
        async with running_pair(gqa, options) as pair:
            with pytest.raises(error):
                await pair.run(make_prompt(num_prompt_tokens), max_tokens=max_tokens)
            await pair.settled()
            prompt = make_prompt(3 * BLOCK_SIZE)
            assert await pair.run(prompt, max_tokens=2) == monolithic(gqa, prompt, max_tokens=2)

    asyncio.run(refused())


def test_a_decode_leg_that_would_decode_nothing_is_refused(gqa: Path) -> None:
    async def refused() -> None:
        async with running_pair(gqa) as pair:
            legs = Legs(pair, make_prompt(9), max_tokens=1)
            with pytest.raises(AssertionError, match="InvalidRequest"):
                await legs.open_decode()
            error = await legs.decode.error()
            assert isinstance(error, InvalidRequest)
            assert error.param == "max_tokens"

    asyncio.run(refused())
