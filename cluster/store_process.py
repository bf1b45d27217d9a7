"""The node's store as a child process: told ready over a pipe, restarted when it dies.

Workers do not die with it: they go on without a store and attach to its successor, which has the disk tier's blocks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from cluster.child import ReportingChild
from cluster.store_settings import StoreHostSettings
from tandem.prefix_store.registry import StoreRecord

STORE_COMMAND = (sys.executable, "-m", "cluster.run_store")


class StoreProcess:
    """One store. `log` takes its output; None shows it on stderr."""

    def __init__(self, settings: StoreHostSettings, *, log: Path | None) -> None:
        self._command = (*STORE_COMMAND, "--settings-json", settings.to_json())
        self._child = ReportingChild("store", log=log)

    @property
    def pid(self) -> int | None:
        """Its process, while it runs."""
        return self._child.pid

    async def start(self) -> StoreRecord:
        """Starts the process and returns when it serves. Raises ClusterError. Call on a thread that lives on."""
        await self._child.start(self._command)
        line = await self._child.line()
        return StoreRecord(**line["ready"])

    async def supervise(self, note: Callable[[str], None]) -> None:
        """Starts the store again whenever it dies; until cancelled."""
        await self._child.supervise(self._restart, note)

    async def _restart(self) -> None:
        await self.start()

    async def stop(self, *, timeout_s: float) -> bool:
        """Ends it; True when it ended by itself. Idempotent."""
        return await self._child.stop(timeout_s=timeout_s)
