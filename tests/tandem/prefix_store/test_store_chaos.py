"""Many clients that put, read and give up, on a small host tier with a disk below: never a wrong byte, no lost slot."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tandem.prefix_store.client import StoreClient
from tests.store_nodes import BLOCK_BYTES, chain, client_of, fill, is_right, payload, run, store_node, until

NUM_CLIENTS = 4
NUM_STEPS = 60
NUM_PREFIXES = 5


class Life:
    """One client's: what it did is counted, so that a run that did nothing is seen."""

    def __init__(self, client: StoreClient, seed: int) -> None:
        self.client = client
        self.drawn = random.Random(seed)
        self.num_read = 0
        self.num_put = 0

    async def live(self) -> None:
        for _ in range(NUM_STEPS):
            names = chain(self.drawn.randint(1, 8), seed=self.drawn.randrange(NUM_PREFIXES))
            step = self.drawn.choices([self.put, self.read, self.give_up], weights=[4, 6, 1])[0]
            await step(names)

    async def put(self, names) -> None:  # type: ignore[no-untyped-def]
        grant = await self.client.put(names, first=self.drawn.randint(0, 1))
        digests = fill(grant, names)
        if self.drawn.random() < 0.2:
            grant.cancel()
        else:
            self.num_put += await grant.commit(digests[: self.drawn.randint(0, len(digests))])

    async def read(self, names) -> None:  # type: ignore[no-untyped-def]
        loan = await self.client.acquire(names)
        await asyncio.sleep(self.drawn.random() * 0.003)
        assert is_right(loan, names)
        assert loan.intact()
        self.num_read += len(loan.slots)
        loan.release()

    async def give_up(self, names) -> None:  # type: ignore[no-untyped-def]
        task = asyncio.ensure_future(self.client.acquire(names))
        await asyncio.sleep(self.drawn.random() * 0.002)
        task.cancel()
        for outcome in await asyncio.gather(task, return_exceptions=True):
            if not isinstance(outcome, BaseException):
                outcome.release()


@pytest.mark.parametrize("policy", ["through", "on_eviction"])
def test_no_reader_sees_a_wrong_byte_and_no_slot_is_lost(redis_url: str, tmp_path: Path, policy: str) -> None:
    async def test() -> None:
        async with store_node(redis_url, num_slots=12, disk=tmp_path, write_policy=policy) as host:
            clients = [client_of(host, f"w{index}") for index in range(NUM_CLIENTS)]
            lives = [Life(await client.__aenter__(), seed) for seed, client in enumerate(clients)]
            await asyncio.gather(*(life.live() for life in lives))
            assert sum(life.num_read for life in lives) > 100
            assert sum(life.num_put for life in lives) > 20
            for client in clients:
                await client.__aexit__(None, None, None)
            await until(lambda: host.store.host.num_reserved == 0)
            await host.store.close()
            assert host.store.host.num_read == 0
            host.store.host.check_invariants()
            assert host.store.disk is not None
            disk = host.store.disk
            stored = disk.names()
            assert stored
            buffers = [memoryview(bytearray(BLOCK_BYTES)) for _ in stored]
            for name, buffer in zip(stored, buffers, strict=True):
                assert await asyncio.wrap_future(disk.read([name], [buffer])) == 1
                assert bytes(buffer) == payload(name).numpy().tobytes()

    run(test)
