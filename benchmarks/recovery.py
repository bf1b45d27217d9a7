"""How long the pools take to be whole again after each kind of loss, and whether requests elsewhere noticed.

Three Ray nodes on this machine (a head without workers, two nodes with one prefill and one decode slot each), an
external Valkey, a router that belongs to none of them, and constant load. One after another are lost: a worker's
process, the controller's, Ray's GCS, a raylet, the head, and a node. Seconds run from the kill until the registry has
every worker that is wanted, ready, and none of the lost ones; for controller, GCS and head, from the kill (of the head:
from the start of its successor) until an order given meanwhile, one decode worker less, is carried out.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.load import Load, constant_load
from benchmarks.nodes import Nodes, Started
from benchmarks.report import finish
from benchmarks.scaling import make_prompts
from cluster.embedded_redis import EmbeddedRedis
from cluster.router_process import RouterProcess
from tandem.config import from_mapping
from tandem.pool_state import PoolState
from tandem.registry import Registry, WorkerRecord
from tandem.types import Role

CLUSTER = "recovery"
ADDRESSES = ("127.0.0.3", "127.0.0.4")
CONFIG: dict[str, Any] = {
    "cluster": CLUSTER,
    "transfer": {"transport": "shm", "lease_s": 5.0},
    "prefill": {"num_blocks": 256, "num_workers": 2, "num_threads": 1},
    "decode": {"num_blocks": 256, "num_workers": 2, "num_threads": 1},
    "router": {"grpc_port": 0, "http_port": 0},
    "drain_timeout_s": 20.0,
    "pin_cores": False,
}
MAX_TOKENS = 16
NUM_CLIENTS = 2
POLL_S = 0.02


@dataclass(kw_only=True)
class World:
    """What is lost and comes back. `seconds` is filled by loss, `failed` with the requests that it cost."""

    nodes: Nodes
    head: Started
    members: dict[str, Started]
    registry: Registry
    state: PoolState
    seconds: dict[str, list[float]] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)

    async def until(self, condition: Callable[[list[WorkerRecord]], bool]) -> list[WorkerRecord]:
        """Waits until the ready workers fulfil the condition."""
        while True:
            ready = [worker for worker in await self.registry.workers() if worker.state == "ready"]
            if condition(ready):
                return ready
            await asyncio.sleep(POLL_S)

    async def until_whole(self, without: set[int], *, num_decode: int = 2) -> list[WorkerRecord]:
        """Waits for two prefill and `num_decode` decode workers, none with a process id in `without`."""

        def is_whole(workers: list[WorkerRecord]) -> bool:
            roles = [worker.role for worker in workers]
            counts = (roles.count(Role.PREFILL), roles.count(Role.DECODE))
            return counts == (2, num_decode) and not without & {worker.pid for worker in workers}

        return await self.until(is_whole)

    async def resize(self, num_decode: int) -> None:
        """Orders a size of the decode pool and waits for it."""
        await self.state.set_size(Role.DECODE, num_decode)
        await self.until_whole(set(), num_decode=num_decode)


def on_node(workers: list[WorkerRecord], address: str) -> set[int]:
    """Process ids of the workers on a node."""
    return {worker.pid for worker in workers if worker.address.rpartition(":")[0] == address}


async def lose_worker(world: World) -> float:
    """kill -9 of a decode worker."""
    victim = next(w for w in await world.until_whole(set()) if w.role is Role.DECODE)
    began_s = time.monotonic()
    psutil.Process(victim.pid).kill()
    await world.until_whole({victim.pid})
    return time.monotonic() - began_s


async def lose_controller(world: World) -> float:
    """kill -9 of the controller; an order is given at once."""
    found = [p for p in world.head.tree() if "cluster.run_controller" in p.cmdline()]
    began_s = time.monotonic()
    found[0].kill()
    await world.resize(1)
    took_s = time.monotonic() - began_s
    await world.resize(2)
    return took_s


async def lose_gcs(world: World) -> float:
    """kill -9 of Ray's GCS; an order is given at once."""
    began_s = time.monotonic()
    world.head.kill_part("gcs_server")
    await world.resize(1)
    took_s = time.monotonic() - began_s
    await world.resize(2)
    return took_s


async def lose_raylet(world: World) -> float:
    """kill -9 of one node's raylet, which takes the workers of that node with it."""
    workers = await world.until_whole(set())
    began_s = time.monotonic()
    world.members[ADDRESSES[0]].kill_part("raylet")
    await world.until_whole(on_node(workers, ADDRESSES[0]))
    return time.monotonic() - began_s


async def lose_head(world: World) -> float:
    """kill -9 of all of the head; its successor gets an order as soon as it is started."""
    world.head.kill()
    began_s = time.monotonic()
    starting = asyncio.create_task(asyncio.to_thread(world.nodes.head))
    await world.resize(1)
    took_s = time.monotonic() - began_s
    world.head = await starting
    await world.resize(2)
    return took_s


async def lose_node(world: World) -> float:
    """kill -9 of all of a node; another one with the same address joins at once."""
    workers = await world.until_whole(set())
    began_s = time.monotonic()
    world.members[ADDRESSES[1]].kill()
    starting = asyncio.create_task(asyncio.to_thread(world.nodes.node, world.head, ADDRESSES[1]))
    await world.until_whole(on_node(workers, ADDRESSES[1]))
    took_s = time.monotonic() - began_s
    world.members[ADDRESSES[1]] = await starting
    return took_s


LOSSES = {
    "worker": lose_worker,
    "controller": lose_controller,
    "GCS": lose_gcs,
    "raylet": lose_raylet,
    "head": lose_head,
    "node": lose_node,
}


async def measure(world: World, endpoint: str, num_rounds: int) -> Load:
    """Loses everything in turn, `num_rounds` times."""
    async with constant_load(endpoint, make_prompts(), num_clients=NUM_CLIENTS, max_tokens=MAX_TOKENS) as load:
        for _ in range(num_rounds):
            for name, lose in LOSSES.items():
                await load.wait_for(NUM_CLIENTS)
                before = len(load.errors)
                took_s = await lose(world)
                await load.wait_for(NUM_CLIENTS)
                world.seconds.setdefault(name, []).append(took_s)
                world.failed[name] = world.failed.get(name, 0) + len(load.errors) - before
                print(f"{name}: {took_s:.1f} s, {len(load.errors) - before} requests failed", file=sys.stderr)
    return load


@asynccontextmanager
async def a_world(directory: Path, redis_url: str) -> AsyncIterator[World]:
    """The nodes, up and whole; ended at the end."""
    nodes = Nodes(directory=directory, redis_url=redis_url, config=CONFIG)
    registry = Registry(redis_url, cluster=CLUSTER, ttl_s=5.0)
    state = PoolState(redis_url, cluster=CLUSTER)
    try:
        head = await asyncio.to_thread(nodes.head)
        members = {address: await asyncio.to_thread(nodes.node, head, address) for address in ADDRESSES}
        world = World(nodes=nodes, head=head, members=members, registry=registry, state=state)
        await world.until_whole(set())
        yield world
    finally:
        await asyncio.to_thread(nodes.end)
        await state.close()
        await registry.close()


async def run(directory: Path, num_rounds: int) -> tuple[World, Load]:
    """All of it, with everything it needs."""
    redis = EmbeddedRedis()
    await redis.start()
    try:
        async with a_world(directory, redis.url) as world:
            router = RouterProcess(from_mapping(CONFIG), redis_url=redis.url, log=directory / "router.log")
            try:
                endpoints = await router.start()
                await router.serving()
                return world, await measure(world, endpoints.grpc, num_rounds)
            finally:
                await router.stop(timeout_s=30)
    finally:
        redis.stop()


def main() -> None:
    """Prints medians over all rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round instead of three")
    parser.add_argument("--json", type=Path, help="write figures and ratios to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as scratch:
        world, load = asyncio.run(run(Path(scratch), 1 if arguments.quick else 3))
    figures = {f"{name} lost: whole again (s)": statistics.median(taken) for name, taken in world.seconds.items()}
    figures |= {f"{name} lost: requests failed": float(count) for name, count in world.failed.items()}
    figures["requests"] = float(len(load.outcomes))
    figures["prompts with another answer"] = float(sum(len(load.tokens_of(name)) > 1 for name in load.prompts))
    for error in load.errors:
        print(error)
    finish(figures, {}, arguments.json, "Losses")


if __name__ == "__main__":
    main()
