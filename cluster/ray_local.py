"""A private local Ray: started quietly in a short temporary directory of its own, and gone without a trace after.

Ray's children die with the thread that started them, so all of Ray is driven from one thread that lives as long as
this object.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from cluster.processes import family, make_temp_dir, sweep
from tandem.errors import ClusterError

T = TypeVar("T")
_log = logging.getLogger("tandem.ray")

OBJECT_STORE_BYTES = 80 * 2**20
"""Ray carries control calls only: neither tokens nor KV go through its object store."""
_LONGEST_TEMP_DIR = 40
"""Unix socket paths end at 107 bytes, and Ray's session adds about 65 to the directory."""


def _environment() -> dict[str, str]:
    """Settings that Ray only takes from the environment; the user's own win.

    The token keeps other users of the host out of this Ray, and given here it is not saved in the home directory.
    """
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


def _session_dir() -> Path:
    path = make_temp_dir("ray")
    if len(str(path)) <= _LONGEST_TEMP_DIR or not Path("/tmp").is_dir():
        return path
    path.rmdir()
    return make_temp_dir("ray", parent=Path("/tmp"))


def take_signals_back() -> None:
    """Ray's core sets handlers that print a stack trace at SIGTERM; this puts Python's own in front again."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.getsignal(number))
        signal.siginterrupt(number, False)


def log_instead_of_print() -> None:
    """Ray prints its nodes' error events to stdout, whatever it was told; stdout is for answers, so they are logged.

    Ray has no setting for this. Where a later Ray has no such function, this changes nothing.
    """
    import ray._private.worker as ray_worker

    def log(data: Mapping[str, Any], ignore_prefix: bool) -> None:
        for line in data.get("lines", ()):
            _log.info("%s", line)

    ray_worker.print_to_stdstream = log


class LocalRay:
    """One Ray of one node. `verbose` shows Ray's and the workers' logs on the terminal."""

    def __init__(self, *, verbose: bool = False) -> None:
        self._verbose = verbose
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ray")
        self._temp_dir: Path | None = None
        self.address = ""
        """host:port at which others can connect, while it runs."""

    @property
    def temp_dir(self) -> Path | None:
        """Where the session lives, while it does."""
        return self._temp_dir

    async def call(self, function: Callable[[], T]) -> T:
        """Runs `function` on Ray's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    async def start(self, resources: Mapping[str, float]) -> None:
        """Starts Ray with exactly these resources ("CPU" among them). Raises ClusterError."""
        try:
            await self.call(lambda: self._start(resources))
        finally:
            take_signals_back()

    def _start(self, resources: Mapping[str, float]) -> None:
        for name, value in _environment().items():
            os.environ.setdefault(name, value)
        import ray

        if ray.is_initialized():
            raise ClusterError("this process is connected to another Ray already; disconnect it first")
        if not self._verbose:
            logging.getLogger("ray").setLevel(logging.ERROR)
            log_instead_of_print()
        self._temp_dir = _session_dir()
        try:
            ray.init(
                address="local",
                num_cpus=int(resources["CPU"]),
                resources={name: amount for name, amount in resources.items() if name != "CPU"},
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                configure_logging=False,
                log_to_driver=self._verbose,
                _temp_dir=str(self._temp_dir),
            )
        except (RuntimeError, OSError, ValueError, ConnectionError, TimeoutError, ray.exceptions.RayError) as exc:
            raise ClusterError(f"Ray could not be started: {exc}") from exc
        self.address = ray.get_runtime_context().gcs_address

    async def stop(self, *, timeout_s: float = 10.0) -> list[str]:
        """Ends Ray, its thread and its directory. Returns the processes that had to be killed. Idempotent."""
        try:
            return await self.call(lambda: self._stop(timeout_s))
        finally:
            self._thread.shutdown(wait=False)

    def _stop(self, timeout_s: float) -> list[str]:
        if self._temp_dir is None:
            return []
        import ray

        processes = family(str(self._temp_dir))
        ray.shutdown()
        killed = sweep(processes, timeout_s=timeout_s)
        shutil.rmtree(self._temp_dir, ignore_errors=True)
        self._temp_dir = None
        return killed
