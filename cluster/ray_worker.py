"""The Ray actor class: loads the real worker in its own process and forwards to it.

The driver names the worker's class as text, so that it never imports torch or a model itself.
"""

from __future__ import annotations

import os
import socket
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


class RayWorker:
    """One worker in one Ray process. `class_path` is "module:Class", built with the one argument `settings`."""

    def __init__(self, class_path: str, settings: dict[str, Any]) -> None:
        settings = settled_here(settings)
        if settings["cores"] and hasattr(os, "sched_setaffinity"):  # before the import: thread pools count cores once
            os.sched_setaffinity(0, settings["cores"])
        module, _, name = class_path.partition(":")
        self._worker: WorkerActor = getattr(import_module(module), name)(settings)

    def ready(self) -> dict[str, Any]:
        """See `WorkerActor`."""
        return self._worker.ready()

    def drain(self, timeout_s: float) -> bool:
        """See `WorkerActor`."""
        return self._worker.drain(timeout_s)

    def stop(self) -> None:
        """See `WorkerActor`."""
        self._worker.stop()

    def ping(self) -> int:
        """See `WorkerActor`."""
        return self._worker.ping()
