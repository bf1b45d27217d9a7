"""A prefill and a decode worker as real processes, each on a core of its own, and a dispatcher that sends to them."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from typing import Any

from cluster.embedded_redis import EmbeddedRedis
from router.dispatcher import WorkerDispatcher
from tandem.config import ClusterConfig, from_mapping, to_mapping
from tandem.key_source import hand_down
from tandem.registry import Registry
from tandem.secret import ClusterKey


def pair_config(**sections: Mapping[str, Any]) -> ClusterConfig:
    """The default model, and what `sections` say."""
    return from_mapping({"cluster": "bench-pair", **sections})


def _worker(channel: Connection, role: str, settings: dict[str, Any]) -> None:
    from decode_pool.actor import DecodeActor
    from prefill_pool.actor import PrefillActor

    actor = (PrefillActor if role == "prefill" else DecodeActor)(settings)
    actor.ready()
    channel.send("ready")
    channel.recv()
    actor.stop()


@asynccontextmanager
async def live_pair(config: ClusterConfig) -> AsyncIterator[WorkerDispatcher]:
    """Ready for requests."""
    key = ClusterKey(secrets.token_bytes(32))
    hand_down(key)
    redis = EmbeddedRedis()
    await redis.start()
    workers = [_start(config, redis.url, role, index) for index, role in enumerate(("prefill", "decode"))]
    try:
        for channel, _ in workers:
            await asyncio.to_thread(channel.recv)
        async with _dispatcher(config.cluster, redis.url, key) as dispatcher:
            yield dispatcher
    finally:
        for channel, process in workers:
            channel.send("stop")
            process.join()
        redis.stop()


def _start(config: ClusterConfig, redis_url: str, role: str, index: int) -> tuple[Connection, Any]:
    cores = sorted(os.sched_getaffinity(0))
    settings = {
        "config": to_mapping(config),
        "worker_id": f"{role}-0",
        "redis_url": redis_url,
        "host": "127.0.0.1",
        "cores": (cores[index % len(cores)],),
    }
    context = multiprocessing.get_context("spawn")
    channel, remote = context.Pipe()
    process = context.Process(target=_worker, args=(remote, role, settings))
    process.start()
    remote.close()
    return channel, process


@asynccontextmanager
async def _dispatcher(cluster: str, redis_url: str, key: ClusterKey) -> AsyncIterator[WorkerDispatcher]:
    registry = Registry(redis_url, cluster=cluster, ttl_s=5.0)
    ready = asyncio.Event()
    dispatcher = WorkerDispatcher(registry, key=key, on_change=ready.set)
    await dispatcher.start()
    try:
        while not dispatcher.ready():
            await ready.wait()
            ready.clear()
        yield dispatcher
    finally:
        await dispatcher.close()
        await registry.close()
