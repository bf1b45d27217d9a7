"""A worker of the same shape as the real ones but without a model, for tests of what Ray does with it."""

from __future__ import annotations

import os
import signal
from typing import Any


class TinyWorker:
    """Ready at once. Worker ids that contain "bad" cannot start."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._startup = {"load": 0.25}

    def ready(self) -> dict[str, Any]:
        from tandem.errors import ModelLoadError

        if self._settings["config"]["model"]["source"] == "bad":
            raise ModelLoadError("no such model")
        role = self._settings["worker_id"].partition("-")[0]
        return {
            "worker_id": self._settings["worker_id"],
            "role": role,
            "address": "127.0.0.1:1",
            "pid": os.getpid(),
            "startup": self._startup,
        }

    def drain(self, timeout_s: float) -> bool:
        return True

    def stop(self) -> None:
        return None

    def ping(self) -> int:
        return os.getpid()


class DyingWorker(TinyWorker):
    """Kills its process while it starts."""

    def ready(self) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("not reached")
