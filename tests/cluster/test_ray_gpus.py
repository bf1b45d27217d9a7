"""Which GPUs a real Ray gives to ranks. That the node has some is only said: nothing here computes on one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cluster.placement import WorkerPlacement
from cluster.pools import RayPools
from cluster.ray_client import RayClient
from cluster.ray_environment import new_token, prepare_environment
from cluster.ray_node import RayNode
from cluster.ray_node_settings import NodeOffer
from tandem.types import Role, WorkerId

SETTLE_S = 60.0


def settings_of(place: WorkerPlacement, directory: Path) -> dict[str, Any]:
    return {
        "config": str(directory),
        "worker_id": str(place.worker_id),
        "host": "127.0.0.1",
        "cores": [],
        "num_ranks": place.num_ranks,
        "rank_resource": "tandem_decode",
    }


@pytest.mark.slow
def test_each_rank_sees_the_gpu_that_is_its_own_and_a_worker_without_one_sees_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")

    async def gpus_of(pools: RayPools, number: int, num_ranks: int) -> str:
        place = WorkerPlacement(worker_id=WorkerId(f"decode-{number}"), role=Role.DECODE, num_ranks=num_ranks)
        info = await pools.start(place)
        return info.address.removeprefix("gpus ")

    async def scenario() -> None:
        prepare_environment(token=new_token())
        node = RayNode()
        try:
            address = await node.start_head(NodeOffer(resources={"tandem_decode": 4.0}, num_gpus=2))
            client = RayClient(address.head, namespace="test")
            await client.connect()
            pools, without = (
                RayPools(
                    client,
                    cluster="test",
                    settings_of=lambda place: settings_of(place, tmp_path),
                    classes={Role.DECODE: "tests.cluster.gpu_worker:GpuWorker"},
                    gpus=gpus,
                )
                for gpus in ({Role.DECODE: 1.0}, {})
            )
            try:
                async with asyncio.timeout(SETTLE_S):
                    first = await gpus_of(pools, 0, 2)
                    while not (tmp_path / "rank-1").exists():  # noqa: ASYNC110  another process writes it
                        await asyncio.sleep(0.05)
                    assert sorted([first, (tmp_path / "rank-1").read_text()]) == ["4", "6"]
                    assert await gpus_of(without, 1, 1) == ""
            finally:
                for worker in await pools.find():
                    await pools.stop(worker.placement.worker_id, 20.0)
                await client.close()
        finally:
            await node.stop()

    asyncio.run(scenario())
