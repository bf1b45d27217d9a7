"""A real router whose Admin sees real prefix stores and workers, all of them in this event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from redis.exceptions import RedisError

from router.admin import PoolAdmin
from router.app import RunningRouter, serve_frontend
from router.cache_admin import CacheAdmin
from router.dispatcher import WorkerDispatcher
from router.frontend import Frontend
from router.view import WorkerView
from tandem.config import ClusterConfig, RouterConfig
from tandem.observability.metrics import RouterMetrics
from tandem.pool_state import PoolState
from tandem.prefix_store.registry import StoreRegistry
from tandem.registry import Registry, WorkerRecord
from tandem.types import Epoch, Role, WorkerId
from tests.factories import CLUSTER_KEY
from tests.pair import Pair
from tests.router_harness import tokenizer
from tests.store_nodes import CLUSTER, FINGERPRINT

NOBODY = "127.0.0.1:1"
_TTL_S = 60.0


def record_of(view: WorkerView) -> WorkerRecord:
    """What a worker's own process would register."""
    return WorkerRecord(
        worker_id=view.worker_id,
        role=view.role,
        address=view.address,
        epoch=view.epoch,
        fingerprint=view.fingerprint,
        model=view.model,
        max_context_tokens=view.max_context_tokens,
        num_blocks=view.num_blocks,
        block_size=view.block_size,
        transport=view.transport,
        pid=1,
        node=view.node,
    )


def absent_workers(*, block_size: int = 1) -> list[WorkerRecord]:
    """Two that are registered and do not answer: enough for a model to be served."""
    prefill = WorkerRecord(
        worker_id=WorkerId("prefill-0"),
        role=Role.PREFILL,
        address=NOBODY,
        epoch=Epoch(1),
        fingerprint=FINGERPRINT,
        model="m",
        max_context_tokens=4096,
        num_blocks=64,
        block_size=block_size,
        transport="shm",
        pid=1,
    )
    return [prefill, replace(prefill, worker_id=WorkerId("decode-0"), role=Role.DECODE)]


def workers_of(pair: Pair) -> list[WorkerRecord]:
    """Both workers of a pair."""
    return [record_of(pair.prefill_view), record_of(pair.decode_view)]


@asynccontextmanager
async def cached_router(
    redis_url: str, workers: Sequence[WorkerRecord], *, has_stores: bool = True, **router: Any
) -> AsyncIterator[RunningRouter]:
    """A router on free ports that knows these workers; stores register themselves. All is forgotten at the end."""
    registry = Registry(redis_url, cluster=CLUSTER, ttl_s=_TTL_S)
    stores = StoreRegistry(redis_url, cluster=CLUSTER, ttl_s=_TTL_S)
    state = PoolState(redis_url, cluster=CLUSTER)
    for record in workers:
        await registry.put(record)
    known = asyncio.Event()
    dispatcher = WorkerDispatcher(registry, key=CLUSTER_KEY, on_change=known.set)
    await dispatcher.start()
    config = ClusterConfig(router=RouterConfig(grpc_port=0, http_port=0, **router))
    cache = CacheAdmin(stores, dispatcher.tracker, is_enabled=True, has_stores=has_stores)
    frontend = Frontend(dispatcher=dispatcher, tokenizer=tokenizer(), config=config.router, metrics=RouterMetrics())
    try:
        if workers:
            await known.wait()
        server = await serve_frontend(frontend, config=config, admin=PoolAdmin(state, dispatcher, cache))
        try:
            yield server
        finally:
            await server.stop(0)
    finally:
        await dispatcher.close()
        with contextlib.suppress(RedisError):  # a test may have stopped it
            for record in workers:
                await registry.remove(record.worker_id)
        for closing in (registry, state, stores):
            await closing.close()
