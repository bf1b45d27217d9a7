"""A worker and its other rank that say which GPUs Ray has given to them, and do nothing else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class GpuRank:
    """Writes what it sees into `directory`, under its rank."""

    def __init__(self, values: dict[str, Any]) -> None:
        found = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
        part = Path(values["directory"]) / "part"
        part.write_text(found)
        part.rename(Path(values["directory"]) / f"rank-{values['rank']}")


class GpuWorker:
    """Rank 0; `config` is the directory."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        values = {"directory": settings["config"], "rank": 1}
        if "start_rank" in settings:
            settings["start_rank"]("tests.cluster.gpu_worker:GpuRank", values)
        self._gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "all")

    def ready(self) -> dict[str, Any]:
        return {
            "worker_id": self._settings["worker_id"],
            "role": "decode",
            "address": f"gpus {self._gpus}",
            "pid": os.getpid(),
            "startup": {},
        }

    def drain(self, timeout_s: float) -> bool:
        return True

    def stop(self) -> None:
        pass

    def ping(self) -> int:
        return os.getpid()
