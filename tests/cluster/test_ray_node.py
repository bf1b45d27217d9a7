"""Ray nodes as processes: a head and a node on one machine, with loopback addresses of their own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import PurePath
from typing import Any

import psutil
import pytest

from cluster.embedded_redis import EmbeddedRedis
from cluster.placement import Selector, WorkerPlacement
from cluster.pools import RayPools
from cluster.processes import marked
from cluster.ray_client import RayClient
from cluster.ray_environment import new_token, prepare_environment
from cluster.ray_node import RayNode
from cluster.ray_node_settings import LOOPBACK_IP, MARK, NodeOffer, RayAddress, RayStorage
from tandem.config import ClusterConfig, split_labels, to_mapping
from tandem.errors import ClusterError, ConfigError
from tandem.key_source import KEY_VARIABLE
from tandem.types import Role, WorkerId
from tests.conftest import children

SETTLE_S = 60.0


@asynccontextmanager
async def head_of(resources: dict[str, float]) -> AsyncIterator[tuple[RayNode, RayAddress]]:
    """A head that is stopped in the end, and must end by itself."""
    prepare_environment(token=new_token())
    node = RayNode()
    try:
        yield node, await node.start_head(NodeOffer(resources=resources))
    finally:
        assert await node.stop() == []


async def until_titled(node: RayNode, *titles: str) -> None:
    """Waits until processes that call themselves so are among the node's: Ray writes that where environments begin."""
    async with asyncio.timeout(SETTLE_S):
        while True:
            if set(titles) <= {PurePath(word).name.strip() for word in first_words(node)}:
                return
            await asyncio.sleep(0.05)


def first_words(node: RayNode) -> Iterator[str]:
    """Of the command lines of a node's processes."""
    for process in node.processes():
        with contextlib.suppress(psutil.NoSuchProcess, IndexError):
            yield process.cmdline()[0]


async def alive(client: RayClient) -> dict[str, dict[str, Any]]:
    """Ray's description of each living node, by id."""
    import ray

    nodes = await client.call(ray.nodes)
    return {node["NodeID"]: node for node in nodes if node["Alive"]}


async def until_alive(client: RayClient, number: int) -> dict[str, dict[str, Any]]:
    """Waits until exactly this many nodes live."""
    async with asyncio.timeout(SETTLE_S):
        while True:
            if len(nodes := await alive(client)) == number:
                return nodes
            await asyncio.sleep(0.05)


@pytest.mark.slow
def test_a_node_joins_with_slots_and_labels_joins_again_when_it_dies_and_leaves_without_a_trace() -> None:
    async def scenario() -> None:
        async with head_of({"tandem_prefill": 2.0}) as (_, address):
            node, client = RayNode(), RayClient(address.head, namespace="test")
            offer = NodeOffer(node_ip="127.0.0.6", resources={"tandem_decode": 3.0}, labels={"rack": "r7"})
            joined = await node.join(address.head, offer)
            await client.connect()
            try:
                nodes = await alive(client)
                await until_titled(node, "raylet", "ray::DashboardAgent", "ray::RuntimeEnvAgent")
                assert set(nodes) == {address.node_id, joined.node_id}
                assert nodes[address.node_id]["Resources"]["tandem_prefill"] == 2.0
                assert nodes[joined.node_id]["NodeManagerAddress"] == "127.0.0.6"
                assert nodes[joined.node_id]["Resources"]["tandem_decode"] == 3.0
                assert nodes[joined.node_id]["Labels"]["rack"] == "r7"

                back = asyncio.Event()

                def note(text: str) -> None:
                    if text == "the Ray node is back":
                        back.set()

                supervising = asyncio.create_task(node.supervise(note))
                first = str(node.temp_dir)
                for process in node.processes():
                    if process.name() == "raylet":
                        os.kill(process.pid, signal.SIGKILL)
                async with asyncio.timeout(SETTLE_S):
                    await back.wait()
                assert joined.node_id not in await until_alive(client, 2)
                assert marked(MARK, first) == []
                supervising.cancel()
                await asyncio.gather(supervising, return_exceptions=True)

                assert await node.drain()
                assert await node.stop() == []
                assert set(await until_alive(client, 1)) == {address.node_id}
            finally:
                await client.close()
                await node.stop()
        assert not children()

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_worker_goes_only_to_a_node_with_the_labels_that_its_pool_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "5a" * 32)

    async def scenario() -> None:
        redis = EmbeddedRedis()
        await redis.start()
        async with head_of({"tandem_decode": 4.0}) as (_, address):
            node, client = RayNode(), RayClient(address.head, namespace="test")
            offer = NodeOffer(node_ip="127.0.0.6", resources={"tandem_decode": 4.0}, labels={"rack": "r7"})
            await node.join(address.head, offer)
            await client.connect()
            pools = RayPools(
                client,
                cluster="test",
                settings_of=lambda place: tiny_settings(place.worker_id, redis.url),
                classes={Role.DECODE: "tests.cluster.tiny_worker:TinyWorker"},
            )
            try:
                in_r7 = [await pools.start(place_in("r7", index)) for index in range(2)]
                assert [info.address.partition(":")[0] for info in in_r7] == ["127.0.0.6"] * 2
                nowhere = asyncio.create_task(pools.start(place_in("r9", 2)))
                async with asyncio.timeout(SETTLE_S):
                    while len(found := await pools.find()) < 3:  # noqa: ASYNC110  Ray announces nothing
                        await asyncio.sleep(0.05)
                assert {w.placement.worker_id: w.is_placed for w in found}[WorkerId("decode-2")] is False
                nowhere.cancel()
                await asyncio.gather(nowhere, return_exceptions=True)
                for worker in found:
                    await pools.stop(worker.placement.worker_id, 20.0)
                assert await pools.find() == []
            finally:
                await client.close()
                await node.stop()
                redis.stop()
        assert not children()

    asyncio.run(scenario())


def place_in(rack: str, index: int) -> WorkerPlacement:
    selector = Selector(labels=split_labels(f"rack={rack}"))
    return WorkerPlacement(worker_id=WorkerId(f"decode-{index}"), role=Role.DECODE, selector=selector)


def tiny_settings(worker_id: WorkerId, redis_url: str) -> dict[str, Any]:
    config = to_mapping(ClusterConfig())
    return {"config": config, "worker_id": worker_id, "redis_url": redis_url, "host": "", "cores": []}


def test_a_port_that_is_taken_fails_in_one_line_and_leaves_nothing() -> None:
    async def scenario() -> None:
        prepare_environment(token=new_token())
        node = RayNode()
        with socket.create_server((LOOPBACK_IP, 0)) as other, pytest.raises(ClusterError, match="cannot listen on"):
            await node.start_head(NodeOffer(resources={}), port=other.getsockname()[1])
        assert node.temp_dir is None
        assert not children()

    asyncio.run(scenario())


def test_the_address_that_ray_would_replace_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1"):
        NodeOffer(node_ip="127.0.0.1", resources={})


def test_the_storage_is_named_by_a_redis_url() -> None:
    storage = RayStorage.from_url("rediss://me:p%40ss@store.example:6380/0")
    assert storage == RayStorage(host="store.example", port=6380, username="me", password="p@ss", tls=True)
    assert storage.address == "rediss://store.example:6380"
    assert RayStorage.from_url("redis://me@store.example", password="p").password == "p"
    assert RayStorage.from_url("redis://me:own@store.example", password="p").password == "own"


@pytest.mark.parametrize("url", ["unix:///run/redis.sock", "store.example:6379", "redis://"])
def test_a_storage_that_ray_cannot_use_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="redis_url"):
        RayStorage.from_url(url)
