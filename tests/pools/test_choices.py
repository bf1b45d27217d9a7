"""Several choices of one request on a real pair: one prefill, one transfer, and each choice ends by itself."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tandem.rpc.tandem.v1 import worker_pb2
from tandem.types import FinishReason, Role, TokenStep, choice_seed
from tests.legs import Legs
from tests.pair import BLOCK_SIZE, Pair, make_prompt, running_pair, until


def test_a_choices_seed_is_fixed_and_the_firsts_is_the_requests() -> None:
    assert [choice_seed(7, choice) for choice in range(3)] == [7, 16240331981837323881, 6675016346680922562]
    assert len({choice_seed(2**64 - 1, choice) for choice in range(128)}) == 128


def num_held(pair: Pair) -> int:
    pool = pair.decode.scheduler.pool
    return pool.num_blocks - pool.num_free


def test_the_prompt_is_sent_once_and_its_full_blocks_are_held_once(gqa: Path) -> None:
    prompt = make_prompt(5 * BLOCK_SIZE + 3)

    async def run() -> None:
        async with running_pair(gqa) as pair:
            alone = pair.dispatch(prompt, max_tokens=4)
            [_ async for _ in alone]
            one = (await alone.finish()).prefill
            before = pair.prefill.num_tokens
            several = pair.dispatch(prompt, max_tokens=4, num_choices=4, temperature=1.0, salt="several")
            steps = [step async for step in several if isinstance(step, TokenStep)]
            result = await several.finish()
            assert one is not None
            assert result.prefill is not None
            assert result.decode is not None
            assert result.prefill.transfer.num_bytes == one.transfer.num_bytes
            assert pair.prefill.num_tokens - before == len(prompt)
            assert result.decode.num_iterations == 3
            for choice in range(4):
                assert [s.position for s in steps if s.choice == choice] == [0, 1, 2, 3]

    asyncio.run(run())


def test_a_choice_that_the_router_ends_frees_its_own_blocks_and_the_others_go_on(gqa: Path) -> None:
    async def run() -> None:
        async with running_pair(gqa) as pair:
            pair.decode_executor.stop()
            legs = await Legs(pair, make_prompt(19), max_tokens=6, num_choices=3, temperature=1.0).open()
            await until(pair.decode_executor.stopped.is_set)
            held = num_held(pair)
            stub = pair.control_stub(Role.DECODE)
            for choice in (1, 1, 77):
                await stub.Abort(worker_pb2.AbortRequest(request_id=legs.request.request_id, choice=choice))
            assert num_held(pair) == held
            pair.decode_executor.go()
            assert await legs.errors() == (None, None)
            tokens = [event.token for event in legs.decode.events if event.WhichOneof("event") == "token"]
            assert [t.position for t in tokens if t.choice == 0] == [1, 2, 3, 4, 5]
            assert [t.position for t in tokens if t.choice == 2] == [1, 2, 3, 4, 5]
            assert not [t for t in tokens if t.choice == 1]

    asyncio.run(run())


def test_a_choice_that_is_ended_before_the_handoff_is_not_decoded(gqa: Path) -> None:
    async def run() -> None:
        async with running_pair(gqa) as pair:
            legs = Legs(pair, make_prompt(19), max_tokens=6, num_choices=2)
            await legs.open_decode()
            stub = pair.control_stub(Role.DECODE)
            await stub.Abort(worker_pb2.AbortRequest(request_id=legs.request.request_id, choice=0))
            legs.open_prefill()
            assert await legs.errors() == (None, None)
            assert {event.token.choice for event in legs.decode.events if event.HasField("token")} == {1}

    asyncio.run(run())


def test_an_abort_of_the_request_ends_every_choice(gqa: Path) -> None:
    async def run() -> None:
        async with running_pair(gqa) as pair:
            pair.decode_executor.stop()
            dispatch = pair.dispatch(make_prompt(19), max_tokens=50, num_choices=4)
            await until(pair.decode_executor.stopped.is_set)
            await dispatch.abort()
            pair.decode_executor.go()
            await pair.settled()

    asyncio.run(run())


def test_requests_that_end_at_once_leave_nothing_to_decode(gqa: Path) -> None:
    prompt = make_prompt(19)

    async def run() -> None:
        async with running_pair(gqa) as pair:
            dispatch = pair.dispatch(prompt, max_tokens=9, num_choices=3, stop_token_ids=tuple(range(320)))
            steps = [step async for step in dispatch if isinstance(step, TokenStep)]
            assert [(s.choice, s.finish_reason) for s in steps] == [(c, FinishReason.STOP) for c in range(3)]
            await dispatch.finish()
            assert pair.decode.num_iterations == 0

    asyncio.run(run())
