"""A real Valkey for a test, clients of it, and workers' records."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from cluster.embedded_redis import EmbeddedRedis
from tandem.pool_state import PoolState
from tandem.prefix_store.registry import StoreRegistry
from tandem.registry import Registry, WorkerRecord
from tandem.types import Epoch, Role, WorkerId

CLUSTER = "test"


def worker_record(worker_id: str, **changes: Any) -> WorkerRecord:
    """A ready worker of the pool that its id names, at 127.0.0.1."""
    values: dict[str, Any] = {
        "worker_id": WorkerId(worker_id),
        "role": Role(worker_id.partition("-")[0]),
        "address": "127.0.0.1:7000",
        "epoch": Epoch(1),
        "fingerprint": "ab" * 16,
        "model": "tiny",
        "max_context_tokens": 2048,
        "num_blocks": 128,
        "block_size": 16,
        "transport": "shm",
        "pid": 77,
    }
    return WorkerRecord(**{**values, **changes})


@asynccontextmanager
async def valkey() -> AsyncIterator[EmbeddedRedis]:
    """A server that is stopped at the end."""
    server = EmbeddedRedis()
    await server.start()
    try:
        yield server
    finally:
        server.stop()


@asynccontextmanager
async def state_of(server: EmbeddedRedis) -> AsyncIterator[PoolState]:
    """A client of the desired state."""
    state = PoolState(server.url, cluster=CLUSTER)
    try:
        yield state
    finally:
        await state.close()


@asynccontextmanager
async def registry_of(server: EmbeddedRedis) -> AsyncIterator[Registry]:
    """A client of the registry; records live for a minute."""
    registry = Registry(server.url, cluster=CLUSTER, ttl_s=60.0)
    try:
        yield registry
    finally:
        await registry.close()


@asynccontextmanager
async def stores_of(server: EmbeddedRedis) -> AsyncIterator[StoreRegistry]:
    """A client of the stores' records."""
    stores = StoreRegistry(server.url, cluster=CLUSTER, ttl_s=60.0)
    try:
        yield stores
    finally:
        await stores.close()
