"""The process that holds one Ray node: `python -m cluster.run_ray_node --settings-json JSON [--ready-fd N]`.

Starts Ray's own processes below itself, says on the fd where the node is, and ends with them: by SIGTERM in order, or
with status 1 when one of them died. Ray's command line would do this in twice the time, with more processes, at
another address than asked for 127.0.0.1 ([decision 5](../docs/decisions/0005-ray-node-process.md)).
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

from cluster.ray_node_settings import MARK, RayNodeSettings

OBJECT_STORE_BYTES = 80 * 2**20
"""Ray carries control calls only: neither tokens nor KV go through its object store."""
_LOOK_EVERY_S = 0.2
_GCS = "gcs_server"


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
        redis_password=settings.storage_password,
        num_cpus=settings.num_cpus,
        num_gpus=0,
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


def watch(node: LeanNode, stopping: threading.Event, *, gcs_may_return: bool) -> str:
    """Returns the name of the part that died, or an empty string when asked to stop."""
    while not stopping.wait(_LOOK_EVERY_S):
        died = [name for name, _ in node.dead_processes()]
        if died == [_GCS] and gcs_may_return:
            print("Ray's GCS died; starting it again from its storage", file=sys.stderr, flush=True)
            node.restart_gcs()
        elif died:
            return str(died[0])
    return ""


def _announce(ready_fd: int | None, values: dict[str, Any]) -> None:
    if ready_fd is not None:
        os.write(ready_fd, json.dumps(values).encode() + b"\n")
        os.close(ready_fd)


def _stop_on_signals() -> threading.Event:
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    return stopping


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
    stopping = _stop_on_signals()
    _announce(arguments.ready_fd, {"address": node.gcs_address, "node_id": node.node_id})
    died = watch(node, stopping, gcs_may_return=bool(settings.storage))
    node.kill_all_processes(check_alive=False, allow_graceful=not died)
    if died:
        print(f"a part of the Ray node died: {died}", file=sys.stderr, flush=True)
    return 1 if died else 0


if __name__ == "__main__":
    raise SystemExit(main())
