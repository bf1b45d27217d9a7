"""Single workers on Ray: find them, start one, wait for it, drain it, take it away.

Each is a detached, named actor in a placement group of its own, so it lives on when the controller that started it
ends, and the next one finds it. Ray restarts its process when that dies. Which workers there should be is not decided
here; tokens and KV never pass through here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from cluster.events import WorkerInfo
from cluster.placement import RESOURCE, Selector, WorkerPlacement, parse_name
from cluster.pool_memory import FoundWorker
from cluster.ray_client import RayClient
from cluster.ray_worker import RayWorker
from cluster.room import NodeRoom, why_no_room
from tandem.errors import ClusterError, TandemError
from tandem.types import Role, WorkerId

logger = logging.getLogger(__name__)

WORKER_CLASSES: Mapping[Role, str] = {
    Role.PREFILL: "prefill_pool.actor:PrefillActor",
    Role.DECODE: "decode_pool.actor:DecodeActor",
}
_CONCURRENT_CALLS = 4
"""`ready` blocks in the actor; drain and stop must pass it."""
_DRAIN_MARGIN_S = 5.0
_PRESENT_STATES = ("PENDING", "PREPARED", "CREATED", "RESCHEDULING")


class Pools(Protocol):
    """What the controller does with workers. Methods raise TandemError; all may be called again."""

    async def find(self) -> list[FoundWorker]:
        """All workers of this cluster in Ray."""

    async def start(self, placement: WorkerPlacement) -> WorkerInfo:
        """Starts a worker and returns when it is ready; waits as long as there is no room for it."""

    async def wait_ready(self, worker_id: WorkerId) -> WorkerInfo:
        """Returns when a worker that exists is ready."""

    async def drain(self, worker_id: WorkerId, timeout_s: float) -> bool:
        """Stops admission and waits; whether nothing runs on it any more."""

    async def stop(self, worker_id: WorkerId, timeout_s: float) -> None:
        """Ends a worker and takes away all of it. What runs on it is cut off."""


class RayPools:
    """`Pools` over one Ray. `settings_of` gives each worker its constructor argument; `gpus` are those of each rank."""

    def __init__(
        self,
        ray: RayClient,
        *,
        cluster: str,
        settings_of: Callable[[WorkerPlacement], dict[str, Any]],
        classes: Mapping[Role, str] = WORKER_CLASSES,
        gpus: Mapping[Role, float] | None = None,
        selectors: Mapping[Role, Selector] | None = None,
    ) -> None:
        self._ray = ray
        self._cluster = cluster
        self._settings_of = settings_of
        self._classes = classes
        self._gpus = gpus or {}
        self._selectors = selectors or {}

    async def find(self) -> list[FoundWorker]:
        """See `Pools`."""
        return await self._ray.call(self._find)

    def _find(self) -> list[FoundWorker]:
        actors, found = _actor_names(), []
        nodes: list[NodeRoom] | None = None
        for name, group in _groups().items():
            place = parse_name(name, self._cluster)
            if place is None:
                continue
            is_placed, why = group.is_placed, ""
            if not is_placed:
                nodes = _nodes() if nodes is None else nodes
                why = why_no_room(group.bundles, self._selectors.get(place.role, Selector()), nodes)
            has_actor = str(place.worker_id) in actors
            found.append(FoundWorker(placement=place, has_actor=has_actor, is_placed=is_placed, waits_for=why))
        return found

    async def start(self, placement: WorkerPlacement) -> WorkerInfo:
        """See `Pools`."""
        actor = await self._ray.call(lambda: self._create(placement))
        return await self._ready(actor, placement.worker_id)

    def _create(self, place: WorkerPlacement) -> Any:
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        labels = dict(place.selector.labels)
        gpus = self._gpus.get(place.role, 0.0)
        group = placement_group(
            [{**bundle, "GPU": gpus} if gpus else bundle for bundle in place.bundles],
            strategy="STRICT_PACK",
            name=place.name(self._cluster),
            lifetime="detached",
            bundle_label_selector=[labels for _ in place.bundles] if labels else None,
        )
        options = {
            "name": str(place.worker_id),
            "lifetime": "detached",
            "num_cpus": 0,
            **({"num_gpus": gpus} if gpus else {}),
            "resources": {RESOURCE[place.role]: 1.0},
            "max_restarts": -1,
            "max_task_retries": 0,
            "max_concurrency": _CONCURRENT_CALLS,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=0
            ),
        }
        settings = {**self._settings_of(place), "gpus_per_rank": gpus}
        try:
            return ray.remote(RayWorker).options(**options).remote(self._classes[place.role], settings)
        except ValueError as exc:  # the name is taken: somebody else has started it
            remove_placement_group(group)
            raise ClusterError(f"worker {place.worker_id} is there already") from exc

    async def wait_ready(self, worker_id: WorkerId) -> WorkerInfo:
        """See `Pools`."""
        return await self._ready(await self._actor(worker_id), worker_id)

    async def _ready(self, actor: Any, worker_id: WorkerId) -> WorkerInfo:
        from ray.exceptions import RayError

        try:
            return WorkerInfo.from_mapping(await self._get(actor.ready))
        except (RayError, TandemError) as exc:
            raise _cause(exc, worker_id) from exc

    async def drain(self, worker_id: WorkerId, timeout_s: float) -> bool:
        """See `Pools`."""
        from ray.exceptions import RayError

        actor = await self._actor(worker_id)
        try:
            async with asyncio.timeout(timeout_s + _DRAIN_MARGIN_S):
                return bool(await self._get(actor.drain, timeout_s))
        except TimeoutError:
            return False
        except (RayError, TandemError) as exc:
            raise ClusterError(f"worker {worker_id} could not be drained: {_last_line(exc)}") from exc

    async def stop(self, worker_id: WorkerId, timeout_s: float) -> None:
        """See `Pools`."""
        from ray.exceptions import RayError

        try:
            if await self._ray.call(lambda: self._is_placed(worker_id)):
                actor = await self._actor(worker_id)
                async with asyncio.timeout(timeout_s):
                    await self._get(actor.stop)
        except (TimeoutError, RayError, TandemError) as exc:
            logger.info("worker %s did not stop by itself, it is killed: %s", worker_id, _last_line(exc))
        await self._ray.call(lambda: _remove(worker_id, self._cluster))

    def _is_placed(self, worker_id: WorkerId) -> bool:
        """Whether its process can be there: a call to one that waits for a place would wait too."""
        places = {parse_name(name, self._cluster): group for name, group in _groups().items()}
        return any(p is not None and p.worker_id == worker_id and g.is_placed for p, g in places.items())

    async def _actor(self, worker_id: WorkerId) -> Any:
        def get() -> Any:
            import ray

            try:
                return ray.get_actor(str(worker_id))
            except ValueError as exc:
                raise ClusterError(f"worker {worker_id} is not there any more") from exc

        return await self._ray.call(get)

    async def _get(self, method: Any, *args: Any) -> Any:
        return await asyncio.wrap_future(await self._ray.call(lambda: method.remote(*args).future()))


class _Group(NamedTuple):
    """What is known of the placement groups of one name: there is more than one while the older one goes."""

    is_placed: bool
    bundles: Sequence[Mapping[str, float]]


def _groups() -> dict[str, _Group]:
    """The placement groups that exist, by name."""
    from ray.util import placement_group_table

    groups: dict[str, _Group] = {}
    for group in placement_group_table().values():
        if group["state"] in _PRESENT_STATES:
            before = groups.get(group["name"])
            is_placed = group["state"] == "CREATED" or (before is not None and before.is_placed)
            groups[group["name"]] = _Group(is_placed, tuple(group["bundles"].values()))
    return groups


def _nodes() -> list[NodeRoom]:
    """The living nodes. What of a node is free Ray tells only in a module that it keeps for itself."""
    import ray
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    return [
        NodeRoom(resources=node["Resources"], free=free.get(node["NodeID"], {}), labels=node["Labels"])
        for node in ray.nodes()
        if node["Alive"]
    ]


def _actor_names() -> set[str]:
    from ray.util import list_named_actors

    return set(list_named_actors())


def _remove(worker_id: WorkerId, cluster: str) -> None:
    """Kills the actor, if it is there, and frees its place."""
    import ray
    from ray.util import get_placement_group, remove_placement_group

    try:
        ray.kill(ray.get_actor(str(worker_id)), no_restart=True)
    except ValueError:
        pass  # already gone
    for name in _groups():
        place = parse_name(name, cluster)
        if place is not None and place.worker_id == worker_id:
            remove_placement_group(get_placement_group(name))


def _last_line(exc: BaseException) -> str:
    inner = getattr(exc, "cause", None) or exc
    lines = str(inner).strip().splitlines() or [type(inner).__name__]
    return lines[-1].strip()


def _cause(exc: BaseException, worker_id: str) -> TandemError:
    """The worker's own error out of Ray's wrapping, with the worker's name in front."""
    inner = getattr(exc, "cause", None) or exc
    text = inner.message if isinstance(inner, TandemError) else f"{type(inner).__name__}: {_last_line(inner)}"
    kind = type(inner) if isinstance(inner, TandemError) and not hasattr(inner, "cause") else ClusterError
    return kind(f"worker {worker_id} could not be started: {text}")
