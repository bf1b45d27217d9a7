"""What a handoff costs in operations, whatever the blocks look like, and what it leaves out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kv_transfer.transport import MessageHeader
from tandem.config import TransportName
from tandem.rpc.tandem.v1 import worker_pb2
from tandem.types import Role
from tests.fakes import Fault
from tests.hash_executor import SPEC, HashExecutor, expected
from tests.legs import Legs
from tests.pair import Pair, PairOptions, make_prompt, running_pair, until

PROMPT = make_prompt(90)
NUM_CHUNKS = 3
CUTS: list[TransportName] = ["shm", "ucx", "collective", "auto"]


class Seen:
    """A policy without faults that remembers."""

    def __init__(self) -> None:
        self.headers: list[MessageHeader] = []

    def __call__(self, header: MessageHeader, index: int) -> Fault:
        self.headers.append(header)
        return Fault.NONE


def fragment(pair: Pair) -> Callable[[], None]:
    """Takes every other block of both pools, so that no two free ones are neighbours; returns what gives them back."""
    taken = []
    for worker in (pair.prefill, pair.decode):
        pool = worker.scheduler.pool
        blocks = pool.allocate(pool.num_blocks)
        assert blocks is not None
        pool.release([b for b in blocks if b % 2])
        taken.append((pool, [b for b in blocks if b % 2 == 0]))
    return lambda: [pool.release(blocks) for pool, blocks in taken] and None


def run(options: PairOptions, *, fragmented: bool) -> tuple[list[int], Any]:
    async def body() -> tuple[list[int], Any]:
        async with running_pair(Path("hash"), options) as pair:
            give_back = fragment(pair) if fragmented else lambda: None
            tokens = await pair.run(PROMPT, max_tokens=3)
            [link] = pair.prefill.links.links()
            counts = (link.stats(), pair.decode.receiver.arrived)
            give_back()
            return tokens, counts

    return asyncio.run(body())


@pytest.mark.parametrize("fragmented", [False, True])
@pytest.mark.parametrize("layers_per_message", [1, 2, 3])
@pytest.mark.parametrize("transport", CUTS)
def test_operations_of_a_handoff_do_not_grow_with_fragmentation(
    transport: TransportName, layers_per_message: int, fragmented: bool
) -> None:
    seen = Seen()
    options = PairOptions(
        transport=transport, faults=seen, layers_per_message=layers_per_message, make_executor=HashExecutor
    )
    tokens, (stats, arrived) = run(options, fragmented=fragmented)
    num_messages = NUM_CHUNKS * -(-SPEC.num_layers // layers_per_message)
    assert tokens == expected(PROMPT, 3)
    assert len(seen.headers) == stats.num_messages == arrived.num_messages == num_messages
    assert stats.num_gathers <= num_messages
    assert arrived.num_scattered <= num_messages
    if not fragmented and layers_per_message == 1:
        assert stats.num_gathers == arrived.num_scattered == 0


def test_the_measured_choice_sends_every_block_of_every_layer_once() -> None:
    seen = Seen()
    tokens, _ = run(PairOptions(faults=seen, layers_per_message=0, make_executor=HashExecutor), fragmented=False)
    sent = [
        (layer, block)
        for header in seen.headers
        for layer in range(header.layer, header.layer + header.num_layers)
        for block in range(header.first_block, header.first_block + header.num_blocks)
    ]
    assert tokens == expected(PROMPT, 3)
    assert sorted(sent) == [(layer, block) for layer in range(SPEC.num_layers) for block in range(12)]


@pytest.mark.parametrize("num_held", [0, 1, 5, 11])
def test_blocks_that_the_decode_worker_holds_are_not_sent(num_held: int) -> None:
    seen = Seen()

    async def body() -> list[int]:
        async with running_pair(Path("hash"), PairOptions(faults=seen, make_executor=HashExecutor)) as pair:
            if num_held:
                await pair.run(PROMPT[: num_held * 8], max_tokens=2)
            seen.headers.clear()
            return await pair.run(PROMPT, max_tokens=3)

    assert asyncio.run(body()) == expected(PROMPT, 3)
    assert sum(header.num_blocks for header in seen.headers) == SPEC.num_layers * (12 - num_held)
    assert all(header.first_block >= num_held for header in seen.headers)


def test_a_prompt_that_the_decode_worker_holds_whole_moves_nothing() -> None:
    seen = Seen()

    async def body() -> list[list[int]]:
        async with running_pair(Path("hash"), PairOptions(faults=seen, make_executor=HashExecutor)) as pair:
            first = await pair.run(PROMPT[:88], max_tokens=3)
            seen.headers.clear()
            return [first, await pair.run(PROMPT[:88], max_tokens=3)]

    assert asyncio.run(body()) == [expected(PROMPT[:88], 3)] * 2
    assert not seen.headers


@pytest.mark.parametrize("role", Role)
def test_a_prompt_that_is_held_whole_and_ended_before_its_first_token_gives_everything_back(role: Role) -> None:
    async def body() -> list[int]:
        async with running_pair(Path("hash"), PairOptions(make_executor=HashExecutor, lease_s=60.0)) as pair:
            await pair.run(PROMPT[:88], max_tokens=3)
            pair.prefill_executor.stop()
            legs = await Legs(pair, PROMPT[:88], max_tokens=3).open()
            await until(pair.prefill_executor.stopped.is_set)
            await pair.control_stub(role).Abort(worker_pb2.AbortRequest(request_id=legs.request.request_id))
            pair.prefill_executor.go()
            assert None not in await legs.errors()
            await pair.settled()
            return await pair.run(PROMPT[:88], max_tokens=3)

    assert asyncio.run(body()) == expected(PROMPT[:88], 3)


def test_the_next_turn_of_a_conversation_moves_only_what_is_new() -> None:
    seen = Seen()

    async def body() -> tuple[list[int], list[int]]:
        async with running_pair(Path("hash"), PairOptions(faults=seen, make_executor=HashExecutor)) as pair:
            output = await pair.run(PROMPT, max_tokens=16)
            seen.headers.clear()
            turn = [*PROMPT, *output, 1, 2, 3]
            return turn, await pair.run(turn, max_tokens=3)

    turn, output = asyncio.run(body())
    assert output == expected(turn, 3)
    num_known = (90 + 15) // 8
    assert min(header.first_block for header in seen.headers) == num_known


def test_requests_of_different_salts_share_nothing() -> None:
    seen = Seen()

    async def body() -> None:
        async with running_pair(Path("hash"), PairOptions(faults=seen, make_executor=HashExecutor)) as pair:
            for salt in ("one", "other", None):
                seen.headers.clear()
                assert await pair.run(PROMPT, max_tokens=3, salt=salt) == expected(PROMPT, 3)
                assert sum(header.num_blocks for header in seen.headers) == SPEC.num_layers * 12
            assert pair.prefill.scheduler.pool.num_cached == 22

    asyncio.run(body())
