"""Worker processes that are killed at any moment, again and again, while requests run."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.embedded_redis import EmbeddedRedis
from router.dispatcher import WorkerDispatcher
from tandem.config import from_mapping, to_mapping
from tandem.errors import TandemError
from tandem.registry import Registry
from tests.factories import CLUSTER_KEY
from tests.pair import BLOCK_SIZE, make_live_request, make_prompt, monolithic, until
from tests.worker_processes import WorkerProcess, stop_forks

NUM_REQUESTS = 80
NUM_AT_ONCE = 8
NUM_KILLS = 4
GIVE_UP_S = 60.0


@pytest.fixture(autouse=True)
def no_forks_are_left() -> Iterator[None]:
    yield
    stop_forks()


def settings(model: Path, redis_url: str, worker_id: str) -> dict[str, Any]:
    config = from_mapping(
        {
            "cluster": "kills",
            "model": {"source": str(model), "block_size": BLOCK_SIZE, "max_context_tokens": 512},
            "prefill": {"num_blocks": 64, "num_threads": 1},
            "decode": {"num_blocks": 64, "num_threads": 1},
            "transfer": {"transport": "auto", "lease_s": 2.0},
            "registry": {"heartbeat_s": 0.1, "ttl_s": 1.0},
        }
    )
    return {
        "config": to_mapping(config),
        "worker_id": worker_id,
        "redis_url": redis_url,
        "host": "127.0.0.1",
        "cores": (),
    }


class Kills:
    """One run over two workers of each pool."""

    def __init__(self, model: Path, redis_url: str) -> None:
        self.model = model
        self.random = random.Random(3)
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        names = [("prefill", "prefill-0"), ("prefill", "prefill-1"), ("decode", "decode-0"), ("decode", "decode-1")]
        self.workers = [WorkerProcess(role, settings(model, redis_url, name)) for role, name in names]

    async def start(self) -> None:
        for worker in self.workers:
            worker.start()
        await asyncio.gather(*(asyncio.to_thread(worker.ready) for worker in self.workers))

    async def kill(self) -> None:
        """One after another, each while the others serve; a killed one is started again at once."""
        for _ in range(NUM_KILLS):
            await asyncio.sleep(self.random.uniform(0.1, 0.6))
            worker = self.random.choice(self.workers)
            await asyncio.to_thread(worker.kill)
            worker.start()
            await asyncio.to_thread(worker.ready)

    async def request(self, dispatcher: WorkerDispatcher) -> None:
        prompt = make_prompt(self.random.randint(1, 60), seed=self.random.randrange(4))
        max_tokens = self.random.randint(2, 12)
        right = monolithic(self.model, prompt, max_tokens=max_tokens)
        given: list[int] = []
        try:
            dispatch = dispatcher.dispatch(make_live_request(prompt, timeout_s=GIVE_UP_S, max_tokens=max_tokens))
            try:
                async for step in dispatch:
                    given.append(step.token_id)
            finally:
                await dispatch.finish()
            outcome = "complete"
        except TandemError as error:
            outcome = error.code
        self.outcomes[outcome] += 1
        if right[: len(given)] != given or (outcome == "complete" and given != right):
            self.wrong.append(f"{given} for {right}: {outcome}")

    async def serve_until(self, killing: asyncio.Task[None], dispatcher: WorkerDispatcher) -> None:
        """Requests without a pause, at least as long as workers are killed."""

        async def client() -> None:
            while self.outcomes.total() < NUM_REQUESTS or not killing.done():
                await self.request(dispatcher)
                await asyncio.sleep(0.01)

        await asyncio.gather(killing, *(client() for _ in range(NUM_AT_ONCE)))


async def all_is_free(dispatcher: WorkerDispatcher) -> None:
    """Every worker answers and holds nothing."""
    deadline = asyncio.get_running_loop().time() + GIVE_UP_S
    while True:
        statuses = [s for s in await dispatcher.tracker.statuses() if s.state == "ready"]
        free = [s.num_free_blocks == s.num_blocks and not s.num_handoffs for s in statuses]
        if len(free) == 4 and all(free):
            return
        assert asyncio.get_running_loop().time() < deadline, statuses
        await asyncio.sleep(0.05)


@pytest.mark.slow
def test_killed_workers_cost_no_wrong_token_and_no_block_and_every_request_ends(gqa: Path) -> None:
    async def body(redis: EmbeddedRedis) -> Kills:
        kills = Kills(gqa, redis.url)
        registry = Registry(redis.url, cluster="kills", ttl_s=1.0)
        dispatcher = WorkerDispatcher(registry, key=CLUSTER_KEY, on_change=lambda: None)
        try:
            await kills.start()
            await dispatcher.start()
            await until(lambda: len(dispatcher.tracker.view().workers) == 4)
            killing = asyncio.create_task(kills.kill())
            await asyncio.wait_for(kills.serve_until(killing, dispatcher), 200)
            await all_is_free(dispatcher)
        finally:
            await dispatcher.close()
            await registry.close()
            await asyncio.gather(*(asyncio.to_thread(worker.stop) for worker in kills.workers))
        return kills

    async def with_redis() -> Kills:
        redis = EmbeddedRedis()
        await redis.start()
        try:
            return await body(redis)
        finally:
            redis.stop()

    kills = asyncio.run(with_redis())
    assert kills.wrong == []
    assert kills.outcomes["complete"] > NUM_REQUESTS / 2, kills.outcomes
