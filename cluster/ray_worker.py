"""The Ray actor class: loads the real worker in its own process and forwards to it.

The driver names the worker's class as text, so that it never imports torch or a model itself.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol


class WorkerActor(Protocol):
    """What `prefill_pool.actor.PrefillActor` and `decode_pool.actor.DecodeActor` look like."""

    def ready(self) -> dict[str, Any]:
        """Blocks until the worker is registered."""

    def drain(self, timeout_s: float) -> bool:
        """Stops admission and waits for what runs; False when time ran out."""

    def stop(self) -> None:
        """Ends everything."""

    def ping(self) -> int:
        """The process id."""


def settled_here(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings for the node that Ray chose, which may change with a restart: its name, its address, and its cores.

    Cores were chosen on the host `cores_host`: on another one the worker is not pinned.
    """
    node = socket.gethostname()
    here = node == settings.get("cores_host", node)
    return {
        **settings,
        "node": node,
        "store_node": _node_id(),
        "host": settings["host"] or _node_address(),
        "cores": settings["cores"] if here else [],
    }


def _node_id() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def _node_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def cores_of_rank(cores: Sequence[int], rank: int, num_ranks: int) -> list[int]:
    """A rank's part of its worker's cores; all of them where there are fewer than ranks."""
    if len(cores) < num_ranks:
        return list(cores)
    first, end = (r * len(cores) // num_ranks for r in (rank, rank + 1))
    return list(cores[first:end])


def _pin(cores: Sequence[int]) -> None:
    """Before torch is imported: thread pools count cores once."""
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def _show_gpus(gpus: float) -> None:
    """A process that was given no GPU sees none: Ray leaves it those of its node. Before torch looks for some."""
    if not gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _load(class_path: str) -> Any:
    module, _, name = class_path.partition(":")
    return getattr(import_module(module), name)


class RankStarter:
    """Starts a worker's other ranks as actors in the bundles of its placement group, one after another.

    They are this process's own: Ray ends them when it dies, however that comes, and they end by themselves when their
    connection to it does. So a worker that is started again begins with no rank of its former life.
    """

    def __init__(self, *, num_ranks: int, resource: str, cores: Sequence[int], gpus: float = 0.0) -> None:
        from ray.util import get_current_placement_group

        self._num_ranks = num_ranks
        self._resource = resource
        self._gpus = gpus
        self._cores = cores
        self._group = get_current_placement_group()
        self._actors: list[Any] = []

    def start(self, class_path: str, values: dict[str, Any]) -> None:
        """See `tandem.worker.host.StartRank`."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        rank = int(values["rank"])
        options = {
            "num_cpus": 0,
            **({"num_gpus": self._gpus} if self._gpus else {}),
            "resources": {self._resource: 1.0},
            "max_restarts": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=rank
            ),
        }
        values = {
            **values,
            "cores": cores_of_rank(self._cores, rank, self._num_ranks),
            "gpus_per_rank": self._gpus,
        }
        self._actors.append(ray.remote(RayRank).options(**options).remote(class_path, values))

    def stop(self) -> None:
        """Takes away what has not ended by itself."""
        import ray

        for actor in self._actors:
            ray.kill(actor)


class RayRank:
    """A rank other than 0, in one Ray process."""

    def __init__(self, class_path: str, values: dict[str, Any]) -> None:
        _pin(values["cores"])
        _show_gpus(values.get("gpus_per_rank", 0.0))
        self._rank = _load(class_path)(values)


class RayWorker:
    """One worker in one Ray process. `class_path` is "module:Class", built with the one argument `settings`."""

    def __init__(self, class_path: str, settings: dict[str, Any]) -> None:
        settings = settled_here(settings)
        num_ranks = int(settings.get("num_ranks", 1))
        self._ranks: RankStarter | None = None
        if num_ranks > 1:
            self._ranks = RankStarter(
                num_ranks=num_ranks,
                resource=settings["rank_resource"],
                cores=settings["cores"],
                gpus=settings.get("gpus_per_rank", 0.0),
            )
            own = cores_of_rank(settings["cores"], 0, num_ranks)
            settings = {**settings, "cores": own, "start_rank": self._ranks.start}
        _pin(settings["cores"])
        _show_gpus(settings.get("gpus_per_rank", 0.0))
        self._worker: WorkerActor = _load(class_path)(settings)

    def ready(self) -> dict[str, Any]:
        """See `WorkerActor`."""
        return self._worker.ready()

    def drain(self, timeout_s: float) -> bool:
        """See `WorkerActor`."""
        return self._worker.drain(timeout_s)

    def stop(self) -> None:
        """See `WorkerActor`."""
        self._worker.stop()
        if self._ranks is not None:
            self._ranks.stop()

    def ping(self) -> int:
        """See `WorkerActor`."""
        return self._worker.ping()
