"""Several Ray nodes, a small model, an external Valkey, and a router that is not on the head: join, lose, leave.

The tests build on each other's cluster, in this order.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from redis import Redis

from benchmarks.nodes import Nodes, Started
from cluster.embedded_redis import EmbeddedRedis
from cluster.router_process import RouterProcess
from tandem.config import from_mapping
from tandem.pool_state import PoolState
from tandem.registry import Registry, WorkerRecord
from tandem.rpc.client import open_channel
from tandem.rpc.tandem.v1 import inference_pb2_grpc
from tandem.types import Role
from tests.conftest import directories
from tests.e2e.live import generate
from tests.tiny_model import save_tiny_llama

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SETTLE_S = 120.0
PACE_S = 0.1
"""Between a client's requests, so that the workers that start meanwhile get a core."""
CLUSTER = "nodes"
FIRST_IP, SECOND_IP, THIRD_IP = "127.0.0.3", "127.0.0.4", "127.0.0.5"


@dataclass
class Bench:
    """What the tests share; a test that replaces a part puts the new one here."""

    nodes: Nodes
    head: Started
    members: dict[str, Started]
    config: dict[str, Any]


@dataclass
class Load:
    """What a client that asks again and again has seen."""

    tokens: list[list[int]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    directory = tmp_path_factory.mktemp("nodes")
    config = {
        "cluster": CLUSTER,
        "model": {"source": str(save_tiny_llama(directory / "tiny", num_kv_heads=2))},
        "prefill": {"num_blocks": 128},
        "decode": {"num_blocks": 128},
        "router": {"grpc_port": 0, "http_port": 0},
        "drain_timeout_s": 20.0,
        "pin_cores": False,
    }
    redis = EmbeddedRedis()
    asyncio.run(redis.start())
    before = directories()
    nodes = Nodes(directory=directory, redis_url=redis.url, config=config)
    try:
        head = nodes.head()
        members = {address: nodes.node(head, address) for address in (FIRST_IP, SECOND_IP)}
        yield Bench(nodes=nodes, head=head, members=members, config=config)
    finally:
        nodes.end()
        redis.stop()
        for path in directories() - before:  # of those that were killed: nobody was left to remove them
            shutil.rmtree(path)


async def until(bench: Bench, condition: Callable[[list[WorkerRecord]], bool]) -> list[WorkerRecord]:
    """Waits until the registered workers fulfil the condition."""
    registry = Registry(bench.nodes.redis_url, cluster=CLUSTER, ttl_s=5.0)
    try:
        async with asyncio.timeout(SETTLE_S):
            while True:
                if condition(workers := await registry.workers()):
                    return workers
                await asyncio.sleep(0.05)
    finally:
        await registry.close()


def has_sizes(num_prefill: int, num_decode: int) -> Callable[[list[WorkerRecord]], bool]:
    """Whether exactly so many workers are registered, all of them ready."""

    def holds(workers: list[WorkerRecord]) -> bool:
        roles = [worker.role for worker in workers if worker.state == "ready"]
        return (roles.count(Role.PREFILL), roles.count(Role.DECODE)) == (num_prefill, num_decode) and len(
            workers
        ) == len(roles)

    return holds


is_whole = has_sizes(1, 1)


async def resize(bench: Bench, num_prefill: int, num_decode: int) -> list[WorkerRecord]:
    """Asks for sizes and waits until the pools have them."""
    state = PoolState(bench.nodes.redis_url, cluster=CLUSTER)
    try:
        await state.set_size(Role.PREFILL, num_prefill)
        await state.set_size(Role.DECODE, num_decode)
        return await until(bench, has_sizes(num_prefill, num_decode))
    finally:
        await state.close()


def place_of(worker: WorkerRecord) -> str:
    """The address of its node."""
    return worker.address.rpartition(":")[0]


@asynccontextmanager
async def own_router(bench: Bench) -> AsyncIterator[str]:
    """A router that does not belong to the head; its gRPC endpoint."""
    log = bench.nodes.directory / "router.log"
    router = RouterProcess(from_mapping(bench.config), redis_url=bench.nodes.redis_url, log=log)
    try:
        endpoints = await router.start()
        await router.serving()
        yield endpoints.grpc
    finally:
        await router.stop(timeout_s=30)


@asynccontextmanager
async def load_on(endpoint: str) -> AsyncIterator[Load]:
    """A client that asks the same again and again while the body runs, its last request included."""
    load, over = Load(), asyncio.Event()

    async def ask() -> None:
        async with open_channel(endpoint) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            while not over.is_set():
                try:
                    load.tokens.append((await generate(stub, "hello", max_tokens=24, ignore_eos=True)).tokens)
                except grpc.aio.AioRpcError as exc:
                    load.errors.append(f"{exc.code()}: {exc.details()}")
                await asyncio.sleep(PACE_S)

    asking = asyncio.create_task(ask())
    try:
        yield load
    finally:
        over.set()
        await asking


async def one_answer(endpoint: str) -> list[int]:
    async with open_channel(endpoint) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        return (await generate(stub, "hello", max_tokens=24, ignore_eos=True)).tokens


def test_requests_are_served_by_workers_on_the_nodes_that_joined(bench: Bench) -> None:
    async def scenario() -> None:
        workers = await until(bench, is_whole)
        assert {place_of(worker) for worker in workers} <= set(bench.members)
        assert len(await one_answer(bench.head.info["grpc"])) == 24

    asyncio.run(scenario())


def test_a_head_that_is_lost_disturbs_no_request_and_its_successor_finds_nodes_and_workers(bench: Bench) -> None:
    async def scenario() -> None:
        before = await until(bench, is_whole)
        async with own_router(bench) as endpoint, load_on(endpoint) as load:
            lost_address = bench.head.info["head"]
            await asyncio.to_thread(bench.head.kill)
            bench.head = await asyncio.to_thread(bench.nodes.head)
            assert bench.head.info["head"] == lost_address
            grown = await resize(bench, 1, 2)
            assert {worker.pid for worker in before} <= {worker.pid for worker in grown}
            await resize(bench, 1, 1)
        assert load.errors == []
        assert len({tuple(tokens) for tokens in load.tokens}) == 1

    asyncio.run(scenario())


def test_a_dead_gcs_comes_back_in_its_place_and_disturbs_no_request(bench: Bench) -> None:
    async def scenario() -> None:
        before = await until(bench, is_whole)
        async with own_router(bench) as endpoint, load_on(endpoint) as load:
            await asyncio.to_thread(bench.head.kill_part, "gcs_server")
            grown = await resize(bench, 2, 2)
            assert {worker.pid for worker in before} <= {worker.pid for worker in grown}
        assert load.errors == []

    asyncio.run(scenario())


def test_a_node_that_is_stopped_has_its_workers_moved_first_and_no_request_fails(bench: Bench) -> None:
    """With a second worker in each pool: the pool serves on while the first is on its way."""

    async def scenario() -> None:
        before = await resize(bench, 2, 2)
        assert {place_of(worker) for worker in before} == {FIRST_IP, SECOND_IP}
        bench.members[THIRD_IP] = await asyncio.to_thread(bench.nodes.node, bench.head, THIRD_IP)
        async with own_router(bench) as endpoint, load_on(endpoint) as load:
            assert await asyncio.to_thread(bench.members.pop(FIRST_IP).stop) == 0
            workers = await until(bench, has_sizes(2, 2))
        assert {place_of(worker) for worker in workers} == {SECOND_IP, THIRD_IP}
        assert load.errors == []
        assert len({tuple(tokens) for tokens in load.tokens}) == 1
        await resize(bench, 1, 1)

    asyncio.run(scenario())


def test_a_node_whose_raylet_died_joins_again_and_the_pools_return_to_their_sizes(bench: Bench) -> None:
    async def scenario() -> None:
        before = await until(bench, is_whole)
        address = place_of(before[0])
        lost = {worker.pid for worker in before if place_of(worker) == address}
        node = bench.members[address]
        await asyncio.to_thread(node.kill_part, "raylet")
        await until(bench, lambda workers: is_whole(workers) and not lost & {worker.pid for worker in workers})
        assert len(await one_answer(bench.head.info["grpc"])) == 24

    asyncio.run(scenario())


def test_a_node_that_is_lost_has_its_workers_started_on_another_one(bench: Bench) -> None:
    async def scenario() -> None:
        before = await until(bench, is_whole)
        address = place_of(before[0])
        lost = {worker.pid for worker in before if place_of(worker) == address}
        await asyncio.to_thread(bench.members.pop(address).kill)
        workers = await until(bench, lambda found: is_whole(found) and not lost & {worker.pid for worker in found})
        assert address not in {place_of(worker) for worker in workers}
        assert len(await one_answer(bench.head.info["grpc"])) == 24

    asyncio.run(scenario())


def test_a_head_that_is_stopped_ends_its_nodes_and_leaves_nothing_of_ray_in_redis(bench: Bench) -> None:
    assert bench.head.stop() == 0
    for node in bench.members.values():
        assert node.process.wait(60) == 0, node.log.read_text()[-4000:]
    with Redis.from_url(bench.nodes.redis_url, decode_responses=True) as redis:
        assert [key for key in redis.scan_iter() if key.startswith("RAY") or key.endswith(":head")] == []
