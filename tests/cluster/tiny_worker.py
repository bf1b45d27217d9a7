"""A worker without a model in the real process around workers: it registers, drains and ends as they do."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from tandem.errors import ModelLoadError
from tandem.registry import WorkerLoad
from tandem.types import Epoch, Role
from tandem.worker.host import HostedWorker, WorkerFacts, WorkerHost, WorkerSettings

DRAIN_S = 0.2


class TinyHosted:
    """Serves nothing but its presence; takes `DRAIN_S` to become idle."""

    def __init__(self, role: Role) -> None:
        self.facts = WorkerFacts(
            role=role,
            fingerprint="tiny",
            model="tiny",
            max_context_tokens=64,
            model_context_tokens=64,
            num_blocks=8,
            block_size=8,
            transport="shm",
        )
        self.metrics_url = ""
        self.metrics = CollectorRegistry()

    def register(self, server: grpc.aio.Server) -> None:
        return None

    def service_names(self) -> Sequence[str]:
        return ()

    def load(self) -> WorkerLoad:
        return WorkerLoad(num_free_blocks=8)

    def start_draining(self) -> None:
        return None

    async def wait_idle(self) -> None:
        await asyncio.sleep(DRAIN_S)

    def end_requests(self) -> None:
        return None

    async def close(self) -> None:
        return None


async def build(settings: WorkerSettings, epoch: Epoch, mark: Callable[[str], None]) -> HostedWorker:
    if settings.config.model.source == "bad":
        raise ModelLoadError("no such model")
    mark("load")
    return TinyHosted(Role(settings.worker_id.partition("-")[0]))


class TinyWorker:
    """Ready at once, unless the model is "bad"."""

    def __init__(self, settings: dict[str, Any]) -> None:
        own = WorkerSettings.from_mapping(settings)
        self._host = WorkerHost(own, Role(own.worker_id.partition("-")[0]), build)

    def ready(self) -> dict[str, Any]:
        return self._host.ready()

    def drain(self, timeout_s: float) -> bool:
        return self._host.drain(timeout_s)

    def stop(self) -> None:
        self._host.stop()

    def ping(self) -> int:
        return os.getpid()
