"""Sees to it that each node with workers' room has a prefix store: the controller's task beside the pools.

A store is a detached, named actor bound to its node. Ray restarts its process; what is missing is started, what belongs
to a node that is gone is forgotten. Nothing else starts or stops stores.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from cluster.placement import RESOURCE
from cluster.ray_client import RayClient
from tandem.errors import TandemError

logger = logging.getLogger(__name__)

PREFIX = "store-"
_PERIOD_S = 2.0
_STOP_S = 10.0


class NodeStores:
    """`settings` is the argument of each store's actor; see `cluster/store_actor.py`."""

    def __init__(self, ray: RayClient, *, settings: dict[str, Any], note: Callable[[str], None]) -> None:
        self._ray = ray
        self._settings = settings
        self._note = note

    async def keep(self, is_acting: Callable[[], bool]) -> None:
        """Looks again and again until cancelled; does nothing while another controller acts."""
        while True:
            if is_acting():
                try:
                    await self._ray.call(self._reconcile)
                except TandemError as exc:
                    logger.warning("the nodes' prefix stores could not be looked after, trying again: %s", exc.message)
            await asyncio.sleep(_PERIOD_S)

    async def end(self) -> None:
        """Ends all stores: the cluster is over."""
        from ray.exceptions import RayError

        actors = await self._ray.call(_actors)
        for name, actor in actors.items():
            try:
                async with asyncio.timeout(_STOP_S):
                    await asyncio.wrap_future(await self._ray.call(lambda a=actor: a.stop.remote().future()))  # type: ignore[misc]
            except (TimeoutError, RayError, TandemError) as exc:
                self._note(f"{name} did not stop by itself, it is killed: {type(exc).__name__}")
            await self._ray.call(lambda n=name: _kill(n))  # type: ignore[misc]

    def _reconcile(self) -> None:
        nodes, names = _nodes(), _names()
        for node in nodes - names:
            self._note(f"prefix store of node {node[:8]} is started")
            _create(node, self._settings)
        for node in names - nodes:
            _kill(PREFIX + node)


def _nodes() -> set[str]:
    """Ids of living nodes that can take workers."""
    import ray

    wanted = set(RESOURCE.values())
    return {node["NodeID"] for node in ray.nodes() if node["Alive"] and wanted & set(node["Resources"])}


def _names() -> set[str]:
    from ray.util import list_named_actors

    return {name.removeprefix(PREFIX) for name in list_named_actors() if name.startswith(PREFIX)}


def _actors() -> dict[str, Any]:
    import ray

    return {PREFIX + node: ray.get_actor(PREFIX + node) for node in _names()}


def _create(node: str, settings: dict[str, Any]) -> None:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from cluster.store_actor import StoreActor

    ray.remote(StoreActor).options(
        name=PREFIX + node,
        lifetime="detached",
        num_cpus=0,
        max_restarts=-1,
        max_concurrency=4,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
    ).remote(settings)


def _kill(name: str) -> None:
    import ray

    try:
        ray.kill(ray.get_actor(name), no_restart=True)
    except ValueError:
        pass  # already gone
