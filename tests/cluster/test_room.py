"""Why no node takes a worker: as a decision, as the controller says it, and of a real Ray whose slots are taken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cluster.placement import Selector, WorkerPlacement
from cluster.pools import RayPools
from cluster.ray_client import RayClient
from cluster.ray_environment import new_token, prepare_environment
from cluster.ray_node import RayNode
from cluster.ray_node_settings import NodeOffer
from cluster.room import NodeRoom, why_no_room
from tandem.types import Role, WorkerId
from tests.cluster.test_controller import World, acting, run
from tests.cluster.test_ray_gpus import settings_of

SLOT = {"tandem_decode": 1.0}
EAST = {"zone": "east"}
SETTLE_S = 60.0


def node(
    slots: float = 0.0, gpus: float = 0.0, *, used: float = 0.0, used_gpus: float = 0.0, **labels: str
) -> NodeRoom:
    resources = {"tandem_decode": slots, "GPU": gpus}
    free = {"tandem_decode": slots - used, "GPU": gpus - used_gpus}
    return NodeRoom(resources=resources, free=free, labels=labels)


@pytest.mark.parametrize(
    ("bundles", "condition", "nodes", "why"),
    [
        ([SLOT], "", [], "there is no node"),
        ([SLOT], "", [node(2, used=1)], ""),
        ([SLOT], "", [node(1, used=1), node(2, used=2)], "too few free decode slots on the nodes"),
        ([SLOT], "", [node(0, 8)], "it needs 1 decode slot on one node, none has more than 0"),
        ([SLOT] * 4, "", [node(2), node(3)], "it needs 4 decode slots on one node, none has more than 3"),
        ([{**SLOT, "GPU": 1.0}], "", [node(4)], "it needs 1 GPU on one node, none has more than 0"),
        ([{**SLOT, "GPU": 1.0}], "", [node(4, 2, used_gpus=2)], "too few free GPUs on the nodes"),
        (
            [{**SLOT, "GPU": 1.0}],
            "",
            [node(0, 2), node(2, 0)],
            "no node has 1 decode slot and 1 GPU together",
        ),
        ([SLOT], "east", [node(2, zone="west"), node(2)], "no node has the labels zone=east"),
        ([SLOT], "east", [node(1, used=1, **EAST), node(2)], "too few free decode slots on the nodes with the labels"),
        ([SLOT], "in(north, east)", [node(1, **EAST)], ""),
        ([SLOT], "!in(north,east)", [node(1, **EAST)], "no node has the labels zone=!in(north,east)"),
        ([SLOT], "!east", [node(1)], ""),
    ],
)
def test_what_a_worker_asks_for_and_no_node_has_is_named(
    bundles: list[dict[str, float]], condition: str, nodes: list[NodeRoom], why: str
) -> None:
    selector = Selector(labels=(("zone", condition),) if condition else ())
    found = why_no_room(bundles, selector, nodes)
    assert found.startswith(why) if why else found == ""


def test_the_controller_says_once_which_workers_wait_and_why() -> None:
    async def test(world: World) -> None:
        controller = world.controller()
        async with acting(controller):
            await world.until_ready("prefill-0", "decode-0")
            world.pools.no_room = "too few free decode slots on the nodes"
            world.pools.may_start.clear()
            await world.state.set_size(Role.DECODE, 2)

            async def is_waiting() -> bool:
                return any(worker.waits_for for worker in await world.state.seen())

            await world.until(is_waiting)
            [waiting] = [worker for worker in await world.state.seen() if worker.waits_for]
            assert (waiting.worker_id, waiting.state) == ("decode-1", "starting")
            assert waiting.waits_for == world.pools.no_room

            async def is_counted() -> bool:
                return 'unplaced_workers{role="decode"} 1.0' in controller.metrics.render().decode()

            await world.until(is_counted)
            world.pools.may_start.set()
            world.pools.workers[WorkerId("decode-1")].waits_for = ""
            await world.until_ready("prefill-0", "decode-0", "decode-1")  # by then it has looked many times
            said = [note for note in world.events.notes if "waits" in note]
            assert said == [f"worker decode-1 waits for a node with room: {waiting.waits_for}"]

    run(test)


@asynccontextmanager
async def one_slot(directory: Path) -> AsyncIterator[RayPools]:
    prepare_environment(token=new_token())
    ray_node = RayNode()
    try:
        address = await ray_node.start_head(NodeOffer(resources={"tandem_decode": 1.0}))
        client = RayClient(address.head, namespace="test")
        await client.connect()
        pools = RayPools(
            client,
            cluster="test",
            settings_of=lambda place: settings_of(place, directory),
            classes={Role.DECODE: "tests.cluster.gpu_worker:GpuWorker"},
        )
        try:
            yield pools
        finally:
            for worker in await pools.find():
                await pools.stop(worker.placement.worker_id, 20.0)
            await client.close()
    finally:
        await ray_node.stop()


async def reasons(pools: RayPools) -> dict[str, str]:
    return {str(worker.placement.worker_id): worker.waits_for for worker in await pools.find()}


@pytest.mark.slow
def test_a_real_ray_without_a_slot_leaves_the_second_worker_waiting_with_its_reason(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with one_slot(tmp_path) as pools, asyncio.timeout(SETTLE_S):
            first, second = (WorkerPlacement(worker_id=WorkerId(f"decode-{n}"), role=Role.DECODE) for n in (0, 1))
            await pools.start(first)
            starting = asyncio.create_task(pools.start(second))
            try:
                while not any((waits := await reasons(pools)).values()):  # noqa: ASYNC110  Ray announces nothing
                    await asyncio.sleep(0.1)
                assert waits == {"decode-0": "", "decode-1": "too few free decode slots on the nodes"}
                await pools.stop(first.worker_id, 20.0)
                await starting
                assert await reasons(pools) == {"decode-1": ""}
            finally:
                starting.cancel()

    asyncio.run(scenario())
