"""What a controller that nobody started from a launcher says: log lines."""

from __future__ import annotations

import logging

from cluster.controller_settings import ControllerEvents
from cluster.events import WorkerInfo
from tandem.errors import TandemError
from tandem.types import WorkerId

logger = logging.getLogger("cluster.controller")


class LoggedEvents(ControllerEvents):
    """Logs each event."""

    def ready(self, info: WorkerInfo) -> None:
        """See `ControllerEvents`."""
        logger.info("worker %s is ready (process %d)", info.worker_id, info.pid)

    def failed(self, worker_id: WorkerId, error: TandemError) -> None:
        """See `ControllerEvents`."""
        logger.warning("%s; it will be tried again", error.message)

    def gone(self, worker_id: WorkerId) -> None:
        """See `ControllerEvents`."""
        logger.info("worker %s is gone", worker_id)

    def note(self, text: str) -> None:
        """See `ControllerEvents`."""
        logger.info("%s", text)
