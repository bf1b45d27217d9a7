"""The process that holds one Ray node: `python -m cluster.run_ray_node --settings-json JSON [--ready-fd N]`.

Starts Ray's own processes below itself, says on the fd where the node is, and ends with them: by SIGTERM in order, or
with status 1 when one of them died. After SIGUSR1 Ray gives the node nothing new to run, and the fd says whether the
head agreed; if not, it may be asked again. Why this is not `ray start`: docs/decisions/0006-ray-node-process.md.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from typing import Any

from ray._private.node import Node
from ray._private.parameter import RayParams

from cluster.node_drain import ask_to_drain
from cluster.ray_node_settings import MARK, OBJECT_STORE_BYTES, RayNodeSettings
from tandem.redis_access import redis_password

_LOOK_EVERY_S = 0.2
_GCS = "gcs_server"
_RAYLET = "raylet"


class LeanNode(Node):  # type: ignore[misc]
    """A Ray node without the dashboard's server, and whose GCS can be started again in its place."""

    def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
        """Not started: nothing here uses it."""

    def restart_gcs(self) -> None:
        """A dead GCS comes back at its address, with what its storage holds."""
        self.kill_gcs_server(check_alive=False)
        self.start_gcs_server()


def start_node(settings: RayNodeSettings) -> LeanNode:
    """Returns when the node is registered. Raises what Ray raises: mostly RuntimeError, and bare Exceptions."""
    params = RayParams(
        node_ip_address=settings.node_ip,
        gcs_address=settings.head_address or None,
        gcs_server_port=None if settings.head_address else settings.port,
        external_addresses=[settings.storage, settings.storage] if settings.storage else None,
        redis_username=settings.storage_user,
        redis_password=redis_password() if settings.storage else None,
        num_cpus=settings.num_cpus,
        num_gpus=settings.num_gpus,
        resources=dict(settings.resources),
        labels=dict(settings.labels),
        object_store_memory=OBJECT_STORE_BYTES,
        temp_dir=settings.temp_dir,
        include_dashboard=False,
        include_log_monitor=False,
        no_monitor=True,
        node_manager_port=0,
        min_worker_port=0,
        max_worker_port=0,
        dashboard_agent_listen_port=0,
    )
    return LeanNode(params, head=not settings.head_address, shutdown_at_exit=False, spawn_reaper=True)


class Lines:
    """Writes JSON lines to the fd; without one, nothing."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def write(self, values: dict[str, Any]) -> None:
        """One line."""
        if self._fd is not None:
            os.write(self._fd, json.dumps(values).encode() + b"\n")


class Orders:
    """What signals have asked for."""

    def __init__(self) -> None:
        self.drain = False
        self._asked = threading.Event()
        self._stop = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._order(stop=True))
        signal.signal(signal.SIGUSR1, lambda *_: self._order(stop=False))

    def _order(self, *, stop: bool) -> None:
        self._stop = self._stop or stop
        self.drain = self.drain or not stop
        self._asked.set()

    def take_drain(self) -> bool:
        """Whether a drain was asked for since this was last called."""
        asked, self.drain = self.drain, False
        return asked

    def stop_asked(self, timeout_s: float) -> bool:
        """Waits for a signal, and says whether one has asked to stop."""
        self._asked.wait(timeout_s)
        self._asked.clear()
        return self._stop


def watch(node: LeanNode, orders: Orders, lines: Lines, *, gcs_may_return: bool) -> str:
    """Returns the name of the part that died, or an empty string when asked to stop."""
    drained = False
    while not orders.stop_asked(_LOOK_EVERY_S):
        if orders.take_drain():
            drained = ask_to_drain(node.get_gcs_client(), node.node_id)
            lines.write({"draining": drained})
        died = [name for name, _ in node.dead_processes()]
        if died == [_GCS] and gcs_may_return:
            print("Ray's GCS died; starting it again from its storage", file=sys.stderr, flush=True)
            node.restart_gcs()
        elif drained and died == [_RAYLET]:
            return ""  # a drained raylet with nothing to do ends by itself
        elif died:
            return str(died[0])
    return ""


def main() -> int:
    """Exit status 0 when it was asked to end, 1 when the node could not be started or died."""
    parser = argparse.ArgumentParser(prog="python -m cluster.run_ray_node", description=__doc__)
    parser.add_argument("--settings-json", required=True, help="see RayNodeSettings")
    parser.add_argument("--ready-fd", type=int, default=None, help="file descriptor for the ready line")
    arguments = parser.parse_args()
    settings = RayNodeSettings.from_json(arguments.settings_json)
    os.environ[MARK] = settings.temp_dir
    # Until the node stands, a signal ends this process at once, and the kernel ends with it whatever it has started.
    try:
        node = start_node(settings)
    except Exception as exc:  # Ray raises bare ones
        print(f"{type(exc).__name__}: {' '.join(str(exc).split())}", file=sys.stderr, flush=True)
        return 1
    orders, lines = Orders(), Lines(arguments.ready_fd)
    lines.write({"address": node.gcs_address, "node_id": node.node_id})
    died = watch(node, orders, lines, gcs_may_return=bool(settings.storage))
    node.kill_all_processes(check_alive=False, allow_graceful=not died)
    if died:
        print(f"a part of the Ray node died: {died}", file=sys.stderr, flush=True)
    return 1 if died else 0


if __name__ == "__main__":
    raise SystemExit(main())
