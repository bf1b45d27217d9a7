"""Two thousand requests while everything goes wrong at once: no wrong token, no lost block, and every request ends.

The model's tokens are checksums of its KV, so a byte in the wrong place shows. Real workers, gRPC, leases, transports;
faults of the fabric, closed legs, deadlines, broken links and stalls are drawn from a seed.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest

from kv_transfer.transport import MessageHeader
from tandem.config import TransportName
from tandem.errors import DeadlineExceeded, TandemError
from tests.fakes import Fault
from tests.hash_executor import HashExecutor, expected
from tests.pair import Legs, Pair, PairOptions, running_pair

NUM_REQUESTS = 2000
NUM_AT_ONCE = 48
LEASE_S = 1.0
GIVE_UP_S = 30.0
"""Longest that a request may take to end, one way or another."""


class Chaos:
    """One run. `fabric` is the transport's policy."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.faults: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.stalled = False
        self.wrong: list[str] = []

    def fabric(self, header: MessageHeader, index: int) -> Fault:
        """Called from several threads; `random.Random` is safe for that."""
        if self.stalled:
            fault = Fault.DELAY
        else:
            kinds = [Fault.CORRUPT, Fault.DROP, Fault.DUPLICATE, Fault.DELAY, Fault.NONE]
            [fault] = self.random.choices(kinds, weights=[2, 1, 6, 6, 85])
        self.faults[fault] += 1
        return fault

    async def trouble(self, pair: Pair) -> None:
        """Releases what is held in another order, stalls the fabric, breaks its links; until cancelled."""
        while True:
            await asyncio.sleep(self.random.uniform(0.01, 0.05))
            pair.fabric.release(self.random)
            drawn = self.random.random()
            if drawn < 0.02:
                self.stalled = True
                await asyncio.sleep(self.random.choice([0.1, 0.3, 1.5 * LEASE_S]))
                self.stalled = False
                self.faults["stall"] += 1
            elif drawn < 0.08:
                for known in pair.prefill.links.links():
                    known.link.close()
                    self.faults["broken link"] += 1

    async def request(self, pair: Pair, number: int) -> None:
        """One request, maybe abandoned; its outcome is counted."""
        prompt = [self.random.randrange(251) for _ in range(self.random.randint(1, 70))]
        max_tokens = self.random.randint(2, 6)
        drawn = self.random.random()
        timeout_s = self.random.uniform(0.001, 0.2) if drawn < 0.04 else GIVE_UP_S
        legs = Legs(pair, prompt, timeout_s=timeout_s, max_tokens=max_tokens)
        try:
            await legs.open()
        except (AssertionError, DeadlineExceeded):
            self.outcomes["refused"] += 1  # its time was up before the leg was open
            return
        if drawn > 0.85:
            await asyncio.sleep(self.random.uniform(0.0, 0.2))
            (legs.decode if drawn > 0.92 else legs.prefill).close()
        self.check(legs, number, expected(prompt, max_tokens), await both_ended(legs))

    def check(self, legs: Legs, number: int, right: list[int], errors: list[TandemError]) -> None:
        """Whether it ended well or badly, what it gave must be the beginning of what is right."""
        given = legs.by_position()
        complete = sorted(given) == list(range(len(right)))
        if any(right[position] != token for position, token in given.items()) or not (complete or errors):
            self.wrong.append(f"request {number}: {given} for {right}, {errors}")
        self.outcomes["complete" if complete else errors[0].code] += 1


async def both_ended(legs: Legs) -> list[TandemError]:
    """What they failed with. As a router does, closes the other leg when one has failed."""
    tasks = {legs.prefill.task, legs.decode.task}
    done, waiting = await asyncio.wait(tasks, timeout=GIVE_UP_S, return_when=asyncio.FIRST_COMPLETED)
    if waiting and any(task.result() is not None for task in done):
        legs.prefill.close()
        legs.decode.close()
    _, hanging = await asyncio.wait(tasks, timeout=GIVE_UP_S)
    assert not hanging, "a request did not end"
    return [error for error in (task.result() for task in tasks) if error is not None]


async def run_all(chaos: Chaos, pair: Pair) -> None:
    waiting = list(range(NUM_REQUESTS))

    async def client() -> None:
        while waiting:
            await chaos.request(pair, waiting.pop())

    trouble = asyncio.create_task(chaos.trouble(pair))
    try:
        await asyncio.gather(*(client() for _ in range(NUM_AT_ONCE)))
    finally:
        trouble.cancel()
        chaos.stalled = False
        while pair.fabric.num_held:
            pair.fabric.release(chaos.random)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm"])
def test_two_thousand_requests_in_chaos_give_right_tokens_lose_no_block_and_all_end(
    transport: TransportName,
) -> None:
    chaos = Chaos(seed=5)
    options = PairOptions(
        transport=transport,
        faults=chaos.fabric,
        prefill_blocks=96,
        decode_blocks=160,
        lease_s=LEASE_S,
        layers_per_message=2,
        make_executor=HashExecutor,
    )

    async def body() -> None:
        async with running_pair(Path("hash"), options) as pair:
            await asyncio.wait_for(run_all(chaos, pair), 240)
            await pair.settled()

    asyncio.run(body())
    assert chaos.wrong == []
    assert chaos.outcomes.total() == NUM_REQUESTS
    assert chaos.outcomes["complete"] > NUM_REQUESTS / 2, chaos.outcomes
    assert all(chaos.faults[kind] for kind in (*Fault, "stall", "broken link")), chaos.faults
