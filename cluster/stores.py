"""Sees to it that each node with workers' room has a prefix store: the controller's task beside the pools.

A store is a detached, named actor bound to its node, of the size that `store_plan.py` finds. Ray restarts its process;
what is missing is started, what belongs to a node that is gone is forgotten. Nothing else starts or stops stores.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from cluster.placement import RESOURCE
from cluster.ray_client import RayClient
from cluster.ray_worker import RayWorker
from cluster.store_plan import IDLE_S, StoreNode, StorePlan
from tandem.config import PrefixStoreConfig, from_mapping, to_mapping
from tandem.errors import ClusterError, TandemError

logger = logging.getLogger(__name__)

STORE_CLASS = "cluster.store_actor:StoreActor"
PREFIX = "store-"
_PERIOD_S = 2.0
_STOP_S = 10.0


class NodeStores:
    """`settings` is the argument of each store's actor; see `cluster/store_actor.py`, and `StorePlan` for `idle_s`."""

    def __init__(
        self,
        ray: RayClient,
        *,
        settings: dict[str, Any],
        note: Callable[[str], None],
        store_class: str = STORE_CLASS,
        idle_s: float = IDLE_S,
    ) -> None:
        self._ray = ray
        self._settings = settings
        self._note = note
        self._store_class = store_class
        self._plan = StorePlan(from_mapping(settings["config"]).prefix_store, idle_s=idle_s)

    async def keep(self, is_acting: Callable[[], bool]) -> None:
        """Looks again and again until cancelled; does nothing while another controller acts."""
        while True:
            if is_acting():
                try:
                    await self._reconcile()
                except TandemError as exc:
                    logger.warning("the nodes' prefix stores could not be looked after, trying again: %s", exc.message)
            await asyncio.sleep(_PERIOD_S)

    async def end(self) -> None:
        """Ends all stores: the cluster is over."""
        for node in await self._ray.call(_names):
            await self._end(node)

    async def _reconcile(self) -> None:
        nodes, present = await self._ray.call(lambda: (_nodes(), _names()))
        changes = self._plan.changes(nodes, present, time.monotonic())
        for refusal in changes.refusals:
            self._note(refusal)
        for node, config in changes.starts.items():
            self._note(f"prefix store of node {node[:8]} is started")
            await self._ray.call(partial(_create, node, self._store_class, self._settings_with(config)))
        for node in changes.ends:
            self._note(f"prefix store of node {node[:8]} ends: no worker is there")
            await self._end(node)
        for node in changes.lost:
            await self._ray.call(partial(_kill, node))

    def _settings_with(self, config: PrefixStoreConfig) -> dict[str, Any]:
        cluster = replace(from_mapping(self._settings["config"]), prefix_store=config)
        return {**self._settings, "config": to_mapping(cluster)}

    async def _end(self, node: str) -> None:
        """Lets it finish its writes to disk, if it can."""
        from ray.exceptions import RayError

        try:
            async with asyncio.timeout(_STOP_S):
                await asyncio.wrap_future(await self._ray.call(partial(_stop, node)))
        except (TimeoutError, RayError, TandemError) as exc:
            self._note(f"{PREFIX}{node} did not stop by itself, it is killed: {type(exc).__name__}")
        await self._ray.call(partial(_kill, node))


def _nodes() -> list[StoreNode]:
    """Living nodes that can take workers."""
    import ray

    wanted, used = set(RESOURCE.values()), _used_nodes()
    return [
        StoreNode(node_id=node["NodeID"], labels=node["Labels"], has_workers=node["NodeID"] in used)
        for node in ray.nodes()
        if node["Alive"] and wanted & set(node["Resources"])
    ]


def _used_nodes() -> set[str]:
    """Ids of nodes on which a worker has its place."""
    from ray.util import placement_group_table

    placed = (group for group in placement_group_table().values() if group["state"] == "CREATED")
    return {node for group in placed for node in group["bundles_to_node_id"].values()}


def _names() -> set[str]:
    """Nodes that have a store."""
    from ray.util import list_named_actors

    return {name.removeprefix(PREFIX) for name in list_named_actors() if name.startswith(PREFIX)}


def _create(node: str, store_class: str, settings: dict[str, Any]) -> None:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.remote(RayWorker).options(
        name=PREFIX + node,
        lifetime="detached",
        num_cpus=0,
        max_restarts=-1,
        max_concurrency=4,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
    ).remote(store_class, {**settings, "cores": []})


def _stop(node: str) -> Future[Any]:
    import ray

    try:
        future: Future[Any] = ray.get_actor(PREFIX + node).stop.remote().future()
    except ValueError as exc:
        raise ClusterError(f"{PREFIX}{node} is not there any more") from exc
    return future


def _kill(node: str) -> None:
    import ray

    try:
        ray.kill(ray.get_actor(PREFIX + node), no_restart=True)
    except ValueError:
        pass  # already gone
