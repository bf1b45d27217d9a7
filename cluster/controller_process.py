"""The controller as a child process: told over a pipe what it did, restarted when it dies, asked to end the cluster.

A controller's death touches no worker: they are detached actors, and its successor finds them.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cluster.child import ReportingChild
from cluster.events import WorkerInfo
from cluster.process_settings import ProcessSettings
from tandem.errors import BY_CODE, ClusterError, TandemError

CONTROLLER_COMMAND = (sys.executable, "-m", "cluster.run_controller")


class ControllerProcess:
    """One controller."""

    def __init__(
        self, settings: ProcessSettings, *, log: Path | None, command: Sequence[str] = CONTROLLER_COMMAND
    ) -> None:
        self._command = [*command, "--settings-json", settings.to_json()]
        self._child = ReportingChild("controller", log=log)
        self._workers: dict[str, WorkerInfo] = {}

    @property
    def pid(self) -> int | None:
        """Its process, while it runs."""
        return self._child.pid

    async def start(self) -> None:
        """Starts the process. Call on a thread that lives on."""
        await self._child.start(self._command)

    async def workers_ready(self, on_ready: Callable[[WorkerInfo], None]) -> list[WorkerInfo]:
        """Returns when both pools have their sizes. Raises what kept a worker from starting, or ClusterError."""
        while True:
            line = await self._child.line()
            if (info := _ready_worker(line)) is not None:
                self._workers[info.worker_id] = info
                on_ready(info)
            elif "failed" in line:
                raise _error(line)
            elif "reached" in line:
                return sorted(self._workers.values(), key=lambda worker: worker.worker_id)

    async def watch(self, note: Callable[[str], None]) -> None:
        """Passes on what the controller says, and starts it again whenever it dies; until cancelled."""
        reading = asyncio.create_task(self._read(note))

        async def restart() -> None:
            nonlocal reading
            reading.cancel()
            await self.start()
            reading = asyncio.create_task(self._read(note))

        try:
            await self._child.supervise(restart, note)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read(self, note: Callable[[str], None]) -> None:
        while True:
            try:
                line = await self._child.line()
            except ClusterError:
                return  # it has ended; the supervision says so
            if (info := _ready_worker(line)) is not None:
                note(f"worker {info.worker_id} is ready (process {info.pid})")
            elif "failed" in line:
                note(f"{_error(line).message}; it will be tried again")
            elif "gone" in line:
                note(f"worker {line['gone']} is gone")
            elif "note" in line:
                note(str(line["note"]))

    async def end_workers(self, *, timeout_s: float, drain: bool) -> bool:
        """Has it drain (or only end) all workers, and end itself; False when that took too long. Idempotent."""
        if self.pid is None:
            return True
        self._child.signal(signal.SIGUSR1 if drain else signal.SIGUSR2)
        try:
            async with asyncio.timeout(timeout_s):
                await self._child.wait()
        except TimeoutError:
            return False
        return True

    async def stop(self, *, timeout_s: float) -> bool:
        """Ends the controller alone; True when it ended by itself. Idempotent."""
        return await self._child.stop(timeout_s=timeout_s)


def _ready_worker(line: dict[str, Any]) -> WorkerInfo | None:
    return WorkerInfo.from_mapping(line["ready"]) if "ready" in line else None


def _error(line: dict[str, Any]) -> TandemError:
    return BY_CODE.get(line["code"], ClusterError)(line["message"])
