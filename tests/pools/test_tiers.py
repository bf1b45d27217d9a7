"""A pair beside its node's store: what left the workers' own blocks comes back from there, with the right bytes.

The model is `HashExecutor`, whose next token depends on every byte of KV, so a wrong block shows.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.store_host import StoreHost
from tandem.errors import WorkerUnavailable
from tandem.kv.tiering import WritePolicy
from tandem.model.spec import fingerprint
from tandem.prefix_store.client import at
from tandem.prefix_store.slab import block_digest
from tests.hash_executor import BLOCK_SIZE, SPEC, HashExecutor, expected
from tests.pair import Pair, PairOptions, make_prompt, running_pair
from tests.store_nodes import run, store_node, until

LAYOUT = SPEC.kv_layout(block_size=BLOCK_SIZE, dtype="float32")
PROMPT = make_prompt(90)
NUM_USABLE = 11
"""Full blocks of the prompt."""


@contextlib.asynccontextmanager
async def node(redis_url: str, **changes: Any) -> AsyncIterator[StoreHost]:
    """A store for the model's blocks."""
    block_bytes = LAYOUT.num_layers * LAYOUT.block_layer_bytes
    values = {"fingerprint": fingerprint(SPEC, LAYOUT), "block_bytes": block_bytes, "num_slots": 128, **changes}
    async with store_node(redis_url, **values) as host:
        yield host


def beside(host: StoreHost, **changes: Any) -> PairOptions:
    """A pair on the store's node."""
    return PairOptions(make_executor=HashExecutor, store=at(host.record.address), **changes)


async def written(pair: Pair, host: StoreHost, num_blocks: int) -> None:
    """Waits until the store has so many blocks and nobody writes any."""
    await until(lambda: len(host.store.host.visible()) >= num_blocks and pair.is_empty())


async def computed(pair: Pair, work: Callable[[], Awaitable[Any]]) -> tuple[Any, int]:
    """What some work gives, and how many prompt tokens were computed for it."""
    before = pair.prefill.num_tokens
    return await work(), pair.prefill.num_tokens - before


def test_another_worker_loads_what_one_has_computed(redis_url: str) -> None:
    async def test() -> None:
        async with node(redis_url) as host:
            async with running_pair(Path("hash"), beside(host)) as pair:
                assert await pair.run(PROMPT, max_tokens=3) == expected(PROMPT, 3)
                await written(pair, host, NUM_USABLE)
            async with running_pair(Path("hash"), beside(host)) as pair:
                tokens, num_computed = await computed(pair, lambda: pair.run(PROMPT, max_tokens=3))
                assert tokens == expected(PROMPT, 3)
                assert num_computed == len(PROMPT) - NUM_USABLE * BLOCK_SIZE
                await until(lambda: not host.store.host.num_read)

    run(test)


def test_the_next_turn_loads_the_output_that_another_pool_has_written(redis_url: str) -> None:
    async def test() -> None:
        async with node(redis_url) as host, running_pair(Path("hash"), beside(host)) as pair:
            output = await pair.run(PROMPT, max_tokens=32)
            num_known = (len(PROMPT) + len(output) - 1) // BLOCK_SIZE
            await written(pair, host, num_known)
            turn = [*PROMPT, *output, 1, 2, 3]
            tokens, num_computed = await computed(pair, lambda: pair.run(turn, max_tokens=3))
            assert tokens == expected(turn, 3)
            assert num_computed == len(turn) - num_known * BLOCK_SIZE

    run(test)


@pytest.mark.parametrize("policy", ["through", "on_eviction"])
def test_what_the_workers_had_to_evict_comes_back(redis_url: str, policy: WritePolicy) -> None:
    prompts = [make_prompt(90, seed) for seed in range(6)]

    async def test() -> None:
        async with node(redis_url) as host:
            options = beside(host, prefill_blocks=40, decode_blocks=40, write_policy=policy)
            async with running_pair(Path("hash"), options) as pair:
                for prompt in prompts:
                    assert await pair.run(prompt, max_tokens=3) == expected(prompt, 3)
                    await until(pair.is_empty)
                assert pair.prefill.scheduler.pool.num_evicted
                tokens, num_computed = await computed(pair, lambda: pair.run(prompts[0], max_tokens=3))
                assert tokens == expected(prompts[0], 3)
                assert num_computed < len(PROMPT)

    run(test)


def test_the_workers_go_on_without_their_store(redis_url: str) -> None:
    async def test() -> None:
        async with node(redis_url) as host, running_pair(Path("hash"), beside(host)) as pair:
            assert await pair.run(PROMPT, max_tokens=3) == expected(PROMPT, 3)
            await host.stop()
            other = make_prompt(90, 1)
            assert await pair.run(other, max_tokens=3) == expected(other, 3)
            assert await pair.run(PROMPT, max_tokens=3) == expected(PROMPT, 3)

    run(test)


def test_a_store_that_comes_later_is_given_what_is_here(redis_url: str) -> None:
    async def test() -> None:
        address = ""

        async def locate() -> str:
            return address

        options = PairOptions(make_executor=HashExecutor, store=locate)
        async with running_pair(Path("hash"), options) as pair:
            await pair.run(PROMPT, max_tokens=3)
            await until(pair.is_empty)
            async with node(redis_url) as host:
                address = host.record.address
                await written(pair, host, NUM_USABLE)

    run(test)


def test_kv_that_was_lent_to_another_meanwhile_is_not_used(redis_url: str) -> None:
    async def test() -> None:
        async with node(redis_url) as host:
            async with running_pair(Path("hash"), beside(host)) as pair:
                await pair.run(PROMPT, max_tokens=3)
                await written(pair, host, NUM_USABLE)
            async with running_pair(Path("hash"), beside(host)) as pair:
                pair.prefill_executor.stop()
                request = asyncio.create_task(pair.run(PROMPT, max_tokens=3))
                await asyncio.to_thread(pair.prefill_executor.stopped.wait)
                host.store.host.slab.generations[:] += 1  # as the store does when it gives slots to others
                pair.prefill_executor.go()
                with pytest.raises(WorkerUnavailable):
                    await request
                await until(pair.is_empty)
                assert not pair.prefill.scheduler.pool.num_named
                host.store.host.slab.generations[:] -= 1
                assert await pair.run(PROMPT, max_tokens=3) == expected(PROMPT, 3)

    run(test)


def test_many_conversations_at_once_get_the_tokens_of_one_alone(redis_url: str) -> None:
    async def talk(pair: Pair, seed: int) -> None:
        text = make_prompt(40, seed % 3)
        for turn in range(4):
            output = await pair.run(text, max_tokens=10)
            assert output == expected(text, 10)
            text = [*text, *output, seed, turn]

    async def test() -> None:
        async with node(redis_url) as host:
            options = beside(host, prefill_blocks=48, decode_blocks=96)
            async with running_pair(Path("hash"), options) as pair:
                await asyncio.gather(*(talk(pair, seed) for seed in range(12)))
            await until(lambda: not host.store.host.num_read)
            host.store.host.check_invariants()

    run(test)


def test_a_fault_in_copying_costs_its_prefix_and_no_later_one(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = [RuntimeError("a fault")]

    def digest(block: torch.Tensor) -> int:
        if faults:
            raise faults.pop()
        return block_digest(block)

    monkeypatch.setattr("tandem.worker.write_back.block_digest", digest)
    prompts = [make_prompt(90, seed) for seed in (1, 2)]

    async def test() -> None:
        async with node(redis_url) as host, running_pair(Path("hash"), beside(host)) as pair:
            assert await pair.run(prompts[0], max_tokens=1) == expected(prompts[0], 1)
            await until(lambda: pair.prefill.write_back.written.num_refused and pair.is_empty())
            assert not host.store.host.num_reserved
            assert await pair.run(prompts[1], max_tokens=1) == expected(prompts[1], 1)
            await written(pair, host, NUM_USABLE)

    run(test)
