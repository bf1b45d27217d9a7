"""Workers without Ray that behave as Ray's do: starts take until they are let go, fail, or die; drains may hang."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from cluster.events import WorkerInfo
from cluster.placement import WorkerPlacement
from cluster.pool_memory import FoundWorker
from tandem.errors import ClusterError, ModelLoadError
from tandem.registry import Registry, WorkerRecord
from tandem.types import Epoch, WorkerId


@dataclass
class FakeWorker:
    """A worker as Ray would have it."""

    placement: WorkerPlacement
    has_actor: bool = True
    is_up: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None
    waits_for: str = ""


class FakePools:
    """A `Pools` whose workers register in a real registry. All knobs may be turned while it runs."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.workers: dict[WorkerId, FakeWorker] = {}
        self.log: list[str] = []
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.may_finish = asyncio.Event()
        self.may_finish.set()
        self.is_broken = False
        self.is_away = False
        self.most = 0
        self.no_room = ""
        """Why new workers find none."""

    async def find(self) -> list[FoundWorker]:
        if self.is_away:
            raise ClusterError("Ray does not answer")
        return [
            FoundWorker(
                placement=worker.placement,
                has_actor=worker.has_actor,
                is_placed=not worker.waits_for,
                waits_for=worker.waits_for,
            )
            for worker in self.workers.values()
        ]

    async def start(self, placement: WorkerPlacement) -> WorkerInfo:
        assert placement.worker_id not in self.workers
        self.log.append(f"start {placement.worker_id}")
        self.workers[placement.worker_id] = FakeWorker(placement, waits_for=self.no_room)
        self.most = max(self.most, len(self.workers))
        return await self.wait_ready(placement.worker_id)

    async def wait_ready(self, worker_id: WorkerId) -> WorkerInfo:
        if worker_id not in self.workers:
            raise ClusterError(f"worker {worker_id} is not there any more")
        await self.may_start.wait()
        if self.is_broken:
            raise ModelLoadError(f"worker {worker_id} could not be started: no such model")
        await self.register(worker_id)
        return WorkerInfo(worker_id=worker_id, role=worker_id.partition("-")[0], address="h:1", pid=1, startup={})

    async def register(self, worker_id: WorkerId) -> None:
        await self.registry.put(self.record(worker_id))

    def record(self, worker_id: WorkerId) -> WorkerRecord:
        place = self.workers[worker_id].placement
        return WorkerRecord(
            worker_id=worker_id,
            role=place.role,
            address="127.0.0.1:1",
            epoch=Epoch(1),
            fingerprint="f",
            model="m",
            max_context_tokens=1,
            num_blocks=1,
            block_size=8,
            transport="shm",
            pid=1,
            generation=place.generation,
        )

    async def drain(self, worker_id: WorkerId, timeout_s: float) -> bool:
        self.log.append(f"drain {worker_id}")
        await self.registry.put(replace(self.record(worker_id), state="draining"))
        try:
            await asyncio.wait_for(self.may_finish.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def stop(self, worker_id: WorkerId, timeout_s: float) -> None:
        self.log.append(f"stop {worker_id}")
        self.workers.pop(worker_id, None)

    async def lose(self, worker_id: WorkerId) -> None:
        """The worker's process and its actor are gone for good."""
        self.workers[worker_id].has_actor = False
        await self.registry.remove(worker_id)
