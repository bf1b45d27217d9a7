"""Stores as actors on a real Ray: of the node's size, and gone with its workers, so that Ray calls the node idle."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import pytest

from cluster.ray_client import RayClient
from cluster.ray_environment import new_token, prepare_environment
from cluster.ray_node import RayNode
from cluster.ray_node_settings import NodeOffer
from cluster.store_plan import HOST_BYTES_LABEL
from cluster.stores import PREFIX, NodeStores
from tandem.config import ClusterConfig, PrefixStoreConfig, to_mapping
from tests.conftest import children

SETTLE_S = 90.0
IDLE_S = 4.0
T = TypeVar("T")


def stored(client: RayClient, notes: list[str]) -> NodeStores:
    config = ClusterConfig(prefix_store=PrefixStoreConfig(host_bytes=1 << 20))
    settings = {"config": to_mapping(config), "redis_url": "", "host": ""}
    return NodeStores(
        client,
        settings=settings,
        note=notes.append,
        store_class="tests.cluster.small_store:SmallStore",
        idle_s=IDLE_S,
    )


async def until(client: RayClient, look: Callable[[], T]) -> T:
    """What `look` finds on Ray's thread, once it finds something."""
    async with asyncio.timeout(SETTLE_S):
        while not (found := await client.call(look)):  # noqa: ASYNC110  Ray announces nothing
            await asyncio.sleep(0.05)
    return found


def sizes() -> list[int]:
    """Of the stores that are there."""
    import ray
    from ray.util import list_named_actors

    names = [name for name in list_named_actors() if name.startswith(PREFIX)]
    return [ray.get(ray.get_actor(name).ready.remote())["host_bytes"] for name in names]


def is_idle() -> bool:
    """Whether an autoscaler would take the node away."""
    from ray._private.worker import global_worker
    from ray.autoscaler.v2.sdk import get_cluster_resource_state
    from ray.core.generated.autoscaler_pb2 import NodeStatus

    states = get_cluster_resource_state(global_worker.gcs_client).node_states
    return [state.status for state in states] == [NodeStatus.IDLE]


@pytest.mark.slow
def test_a_store_has_its_node_s_size_and_leaves_a_node_without_workers_idle() -> None:
    async def scenario() -> None:
        prepare_environment(token=new_token())
        node, notes = RayNode(), list[str]()
        offer = NodeOffer(resources={"tandem_decode": 1.0}, labels={HOST_BYTES_LABEL: "4096"})
        client = RayClient((await node.start_head(offer)).head, namespace="test")
        await client.connect()
        keeping = asyncio.create_task(stored(client, notes).keep(lambda: True))
        try:
            assert await until(client, sizes) == [4096]
            await until(client, lambda: not is_idle())
            await until(client, lambda: not sizes())
            assert await until(client, is_idle)
        finally:
            keeping.cancel()
            with suppress(asyncio.CancelledError):
                await keeping
            await client.close()
            assert await node.stop() == []
        assert [note.split(" of node ")[0] for note in notes] == ["prefix store"] * 2
        assert notes[-1].endswith("ends: no worker is there")
        assert not children()

    asyncio.run(scenario())
