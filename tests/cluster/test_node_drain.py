"""Taking the workers off a node, with a real Valkey and a controller that takes out what it is asked to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from cluster.embedded_redis import EmbeddedRedis
from cluster.node_drain import drain_node
from tandem.config import ClusterConfig, RegistryConfig
from tandem.errors import ClusterError
from tandem.pool_state import PoolState
from tandem.registry import Registry
from tandem.tasks import cancel_all
from tests.metadata import CLUSTER, registry_of, state_of, valkey, worker_record
from tests.router_harness import runs_async

HERE, THERE = "127.0.0.78", "127.0.0.79"


def config_of(server: EmbeddedRedis) -> ClusterConfig:
    return ClusterConfig(cluster=CLUSTER, registry=RegistryConfig(redis_url=server.url))


@asynccontextmanager
async def obeying(state: PoolState, registry: Registry, *, successors: int = 0) -> AsyncIterator[list[str]]:
    """A controller that removes workers that are to be drained; the first successors land on the same node."""
    obeyed: list[str] = []

    async def obey() -> None:
        async for _ in state.changes():
            for worker_id in (await state.get()).drain:
                await state.drained(worker_id)
                if len(obeyed) < successors:
                    await registry.put(worker_record(f"decode-{7 + len(obeyed)}", address=f"{HERE}:7001"))
                await registry.remove(worker_id)
                obeyed.append(worker_id)

    task = asyncio.create_task(obey())
    try:
        yield obeyed
    finally:
        await cancel_all([task])


@runs_async
async def test_all_workers_of_the_node_and_no_others_leave() -> None:
    notes: list[str] = []
    async with valkey() as server, registry_of(server) as registry, state_of(server) as state:
        await registry.put(worker_record("decode-0", address=f"{HERE}:7000"))
        await registry.put(worker_record("prefill-0", address=f"{HERE}:7001"))
        await registry.put(worker_record("prefill-1", address=f"{THERE}:7000"))
        async with obeying(state, registry):
            left = await drain_node(config_of(server), node_ip=HERE, timeout_s=30, note=notes.append)
        assert sorted(left) == ["decode-0", "prefill-0"]
        assert [record.worker_id for record in await registry.workers()] == ["prefill-1"]
    assert notes == [f"no Ray node runs here at {HERE}: it is not closed to new workers"]


@runs_async
async def test_a_successor_that_lands_on_the_same_node_is_taken_off_too() -> None:
    async with valkey() as server, registry_of(server) as registry, state_of(server) as state:
        await registry.put(worker_record("decode-0", address=f"{HERE}:7000"))
        async with obeying(state, registry, successors=1) as obeyed:
            left = await drain_node(config_of(server), node_ip=HERE, timeout_s=30, note=lambda _: None)
        assert left == obeyed == ["decode-0", "decode-7"]


@runs_async
async def test_workers_that_are_still_there_when_time_is_up_are_named() -> None:
    async with valkey() as server, registry_of(server) as registry, state_of(server) as state:
        await registry.put(worker_record("decode-0", address=f"{HERE}:7000"))
        with pytest.raises(ClusterError, match=rf"still at {HERE} after 0\.2 s: decode-0"):
            await drain_node(config_of(server), node_ip=HERE, timeout_s=0.2, note=lambda _: None)
        assert (await state.get()).drain == {"decode-0"}


@runs_async
async def test_without_redis_the_drain_fails_and_says_so() -> None:
    config = ClusterConfig(registry=RegistryConfig(redis_url="redis://127.0.0.1:1/0"))
    with pytest.raises(ClusterError, match="cannot be drained, Redis is away"):
        await drain_node(config, node_ip=HERE, timeout_s=1, note=lambda _: None)
