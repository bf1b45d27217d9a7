"""How much of a handoff is left when the prefill is over: a real prefill and a real decode worker process.

A prompt of 1,024 tokens through the default model, one worker of each pool on cores of their own, no router between.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import secrets
import time
import uuid
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

from cluster.embedded_redis import EmbeddedRedis
from router.dispatcher import WorkerDispatcher
from tandem.config import TransportName, from_mapping, to_mapping
from tandem.key_source import hand_down
from tandem.registry import Registry
from tandem.secret import ClusterKey
from tandem.types import Request, RequestId, SamplingParams

NUM_TOKENS = 1024
CLUSTER = "bench-exposed"


def _worker(channel: Connection, role: str, settings: dict[str, Any]) -> None:
    from decode_pool.actor import DecodeActor
    from prefill_pool.actor import PrefillActor

    actor = (PrefillActor if role == "prefill" else DecodeActor)(settings)
    actor.ready()
    channel.send("ready")
    channel.recv()
    actor.stop()


async def _one(dispatcher: WorkerDispatcher, number: int) -> tuple[float, float]:
    """(exposed seconds, prefill seconds) of one prompt."""
    drawn = random.Random(number)
    now = time.monotonic()
    request = Request(
        request_id=RequestId(uuid.uuid4().hex),
        prompt_token_ids=tuple(drawn.randrange(1000, 40_000) for _ in range(NUM_TOKENS)),
        sampling=SamplingParams(max_tokens=2, temperature=0.0),
        arrival_s=now,
        deadline_s=now + 300.0,
    )
    dispatch = dispatcher.dispatch(request)
    async for _ in dispatch:
        pass
    result = await dispatch.finish()
    assert result.prefill is not None
    return result.prefill.transfer.exposed_s, result.prefill.prefill_s


async def _measure(redis_url: str, key: ClusterKey, num_rounds: int) -> list[tuple[float, float]]:
    registry = Registry(redis_url, cluster=CLUSTER, ttl_s=5.0)
    ready = asyncio.Event()
    dispatcher = WorkerDispatcher(registry, key=key, on_change=ready.set)
    await dispatcher.start()
    try:
        while not dispatcher.ready():
            await ready.wait()
            ready.clear()
        await _one(dispatcher, 0)  # opens the link
        return [await _one(dispatcher, number) for number in range(1, num_rounds + 1)]
    finally:
        await dispatcher.close()
        await registry.close()


def run(*, transport: TransportName, num_rounds: int) -> dict[str, float]:
    """Medians over the rounds: `exposed_s`, `prefill_s`, and `ratio`, the median of each round's own."""
    return asyncio.run(_run(transport, num_rounds))


async def _run(transport: str, num_rounds: int) -> dict[str, float]:
    key = ClusterKey(secrets.token_bytes(32))
    hand_down(key)
    redis = EmbeddedRedis()
    await redis.start()
    context = multiprocessing.get_context("spawn")
    cores = sorted(os.sched_getaffinity(0))
    config = to_mapping(
        from_mapping(
            {
                "cluster": CLUSTER,
                "transfer": {"transport": transport},
                "model": {"max_context_tokens": 2048},
                "prefill": {"num_blocks": 256},
                "decode": {"num_blocks": 256},
            }
        )
    )
    workers = []
    try:
        for index, role in enumerate(("prefill", "decode")):
            settings = {
                "config": config,
                "worker_id": f"{role}-0",
                "redis_url": redis.url,
                "host": "127.0.0.1",
                "cores": (cores[index % len(cores)],),
            }
            channel, remote = context.Pipe()
            process = context.Process(target=_worker, args=(remote, role, settings))
            process.start()
            remote.close()
            workers.append((channel, process))
        for channel, _ in workers:
            await asyncio.to_thread(channel.recv)
        rounds = await _measure(redis.url, key, num_rounds)
    finally:
        for channel, process in workers:
            channel.send("stop")
            process.join()
        redis.stop()
    return {
        "exposed_s": median(exposed for exposed, _ in rounds),
        "prefill_s": median(prefill for _, prefill in rounds),
        "ratio": median(exposed / prefill for exposed, prefill in rounds),
    }
