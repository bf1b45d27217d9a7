"""A request whose time runs out ends with DeadlineExceeded in whatever phase it is, and gives everything back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kv_transfer.transport import MessageHeader
from tandem.errors import DeadlineExceeded
from tests.fakes import Fault
from tests.legs import Legs
from tests.pair import Pair, PairOptions, make_prompt, monolithic, running_pair, until

PROMPT = make_prompt(40)
TIMEOUT_S = 0.5


async def decode_leg_alone(pair: Pair) -> Legs:
    legs = Legs(pair, PROMPT, timeout_s=TIMEOUT_S)
    await legs.open_decode()
    return legs


async def both_legs(pair: Pair, max_tokens: int = 9) -> Legs:
    return await Legs(pair, PROMPT, timeout_s=TIMEOUT_S, max_tokens=max_tokens).open()


async def run(model: Path, options: PairOptions, phase: str) -> None:
    async with running_pair(model, options) as pair:
        if phase == "no handoff comes":
            legs = await decode_leg_alone(pair)
        elif phase == "no ticket comes":
            pair.decode_executor.stop()
            neighbour = asyncio.create_task(pair.run(PROMPT, max_tokens=9))
            await until(pair.decode_executor.stopped.is_set)
            legs = await both_legs(pair)
        elif phase == "prefilling":
            pair.prefill_executor.stop()
            legs = await both_legs(pair)
        elif phase == "moving":
            legs = await both_legs(pair)
            await until(lambda: pair.fabric.num_held > 0)
        else:
            pair.decode_executor.stop()
            legs = await both_legs(pair)
            await until(pair.decode_executor.stopped.is_set)
        assert isinstance(await legs.decode.error(), DeadlineExceeded)
        if phase not in ("no handoff comes", "decoding"):
            assert isinstance(await legs.prefill.error(), DeadlineExceeded)
        pair.prefill_executor.go()
        pair.decode_executor.go()
        if phase == "no ticket comes":
            assert await neighbour == monolithic(model, PROMPT, max_tokens=9)
        await pair.settled()


@pytest.mark.parametrize("phase", ["no handoff comes", "no ticket comes", "prefilling", "moving", "decoding"])
def test_time_that_runs_out_is_a_typed_error_and_every_block_comes_back(gqa: Path, phase: str) -> None:
    def policy(header: MessageHeader, index: int) -> Fault:
        return Fault.DELAY if phase == "moving" else Fault.NONE

    options = PairOptions(faults=policy, decode_blocks=6 if phase == "no ticket comes" else 64, lease_s=2.0)
    asyncio.run(run(gqa, options, phase))


def test_the_router_hears_of_the_deadline_from_the_legs(gqa: Path) -> None:
    async def late() -> None:
        async with running_pair(gqa) as pair:
            pair.decode_executor.stop()
            with pytest.raises(DeadlineExceeded):
                await pair.run(PROMPT, timeout_s=TIMEOUT_S)
            pair.decode_executor.go()

    asyncio.run(late())
