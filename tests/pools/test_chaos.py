"""Two thousand requests while everything goes wrong at once: no wrong token, no lost block, and every request ends.

The model's tokens are checksums of its KV, so a byte in the wrong place shows. Workers are processes with real gRPC,
leases and transports; faults of the fabric, kills, stops, clients that go and deadlines are drawn from a seed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest

from tandem.config import TransportName
from tandem.errors import DeadlineExceeded, HandoffFailed, WorkerUnavailable
from tests.chaos import CLIENT_GONE, COMPLETE, NUM_KILLS, NUM_REQUESTS, NUM_STALLS, Chaos
from tests.chaos_cluster import all_is_free, running_dispatcher
from tests.fakes import Fault
from tests.faulty_worker import BROKEN, STALL
from tests.worker_processes import stop_forks

SEED = int(os.environ.get("CHAOS_SEED", "5"))
"""Others find other things; what meets what is the machine's in any case."""
LIMIT_S = 480.0
"""Of the whole run: where the machine is very busy, it is slow."""
MAY_END_WITH = {COMPLETE, CLIENT_GONE, *(e.code for e in (WorkerUnavailable, HandoffFailed, DeadlineExceeded))}


@pytest.fixture(scope="module", autouse=True)
def no_forks_are_left() -> Iterator[None]:
    yield
    stop_forks()


async def run(chaos: Chaos, redis_url: str) -> None:
    try:
        await chaos.start()
        async with running_dispatcher(redis_url) as dispatcher, asyncio.timeout(LIMIT_S):
            await chaos.run(dispatcher)
            await all_is_free(dispatcher)
    except TimeoutError as exc:
        raise AssertionError(f"not over within {LIMIT_S:g} s: {chaos.outcomes}, {chaos.troubles}") from exc
    finally:
        await asyncio.gather(*(asyncio.to_thread(worker.stop) for worker in chaos.workers))


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 120)
@pytest.mark.parametrize("transport", ["shm", "ucx"])
def test_two_thousand_requests_in_chaos_give_right_tokens_lose_no_block_and_all_end(
    redis_url: str, transport: TransportName
) -> None:
    chaos = Chaos(SEED, transport=transport, redis_url=redis_url)
    asyncio.run(run(chaos, redis_url))
    faults = chaos.faults()
    print(chaos.outcomes, chaos.troubles, faults, f"{chaos.num_retries:g} retries", chaos.num_found_tokens, "found")
    assert chaos.wrong == []
    assert chaos.outcomes.total() >= NUM_REQUESTS
    assert chaos.outcomes[COMPLETE] > NUM_REQUESTS / 2, chaos.outcomes
    assert chaos.outcomes.keys() <= MAY_END_WITH
    assert chaos.num_kills >= NUM_KILLS
    assert chaos.num_stalls >= NUM_STALLS
    assert chaos.num_retries > 0
    assert chaos.num_found_tokens > 0
    assert all(faults[kind] for kind in (*Fault, STALL, BROKEN)), faults
    assert not any(worker.said[-1].num_swapped for worker in chaos.workers)
