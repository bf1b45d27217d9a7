"""The prefill worker over gRPC: translates calls to `worker.PrefillWorker` and back."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from kv_transfer.link_status import by_peer
from prefill_pool.job import Job, Target
from prefill_pool.worker import PrefillWorker
from tandem.errors import RequestCancelled, TandemError
from tandem.registry import WorkerLoad
from tandem.rpc.convert import prefill_request_from_proto
from tandem.rpc.status import typed_errors
from tandem.rpc.tandem.v1 import inference_pb2, worker_pb2, worker_pb2_grpc
from tandem.rpc.worker_service import WorkerControl, WorkerServicer
from tandem.types import Epoch, HandoffId, RequestId, WorkerId
from tandem.worker.grammars import compiled_grammar
from tandem.worker.host import WorkerFacts

Context = grpc.aio.ServicerContext[Any, Any]


class PrefillService(worker_pb2_grpc.PrefillWorkerServicer, WorkerControl):
    """A `HostedWorker`: the prefill leg, and control."""

    def __init__(self, worker: PrefillWorker, facts: WorkerFacts) -> None:
        self.worker = worker
        self.facts = facts
        self.metrics_url = ""
        worker.metrics.follow(self.status)

    def register(self, server: grpc.aio.Server) -> None:
        """Adds its gRPC services."""
        worker_pb2_grpc.add_PrefillWorkerServicer_to_server(self, server)
        worker_pb2_grpc.add_WorkerServicer_to_server(WorkerServicer(self), server)

    def service_names(self) -> Sequence[str]:
        """Their full names."""
        return ("tandem.v1.PrefillWorker", "tandem.v1.Worker")

    async def Prefill(
        self, request: worker_pb2.PrefillRequest, context: Context
    ) -> AsyncIterator[worker_pb2.PrefillEvent]:
        """The prefill leg; see worker.proto."""
        async with typed_errors(context):
            asked = prefill_request_from_proto(request, now=time.monotonic())
            grammar = await compiled_grammar(self.worker.executor.grammars, asked)
            job = self.worker.submit(asked, _target_of(request), grammar)
            try:
                async for event in _events(job):
                    yield event
            finally:
                self.worker.fail(job, RequestCancelled("the router closed the prefill leg"))

    # --- control

    @property
    def metrics(self) -> CollectorRegistry:
        """What it exports."""
        return self.worker.metrics.registry

    def status(self) -> inference_pb2.WorkerStatus:
        """What this worker is doing now; id and address are the caller's knowledge."""
        with self.worker.lock:
            return self._status()

    def _status(self) -> inference_pb2.WorkerStatus:
        worker, scheduler = self.worker, self.worker.scheduler
        return inference_pb2.WorkerStatus(
            worker_id=worker.worker_id,
            role=self.facts.role,
            state="draining" if worker.is_draining else "ready",
            epoch=worker.epoch,
            num_blocks=scheduler.pool.num_blocks,
            num_free_blocks=scheduler.pool.num_free,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_waiting_tokens=scheduler.num_waiting_tokens,
            num_handoffs=worker.num_handoffs,
            pid=os.getpid(),
            cores=sorted(os.sched_getaffinity(0)),
            num_iterations=worker.num_iterations,
            num_tokens=worker.num_tokens,
            metrics_url=self.metrics_url,
            compute=self.facts.compute,
            links=by_peer(worker.link_statuses()),
            device_tier=worker.write_back.tier(),
        )

    def load(self) -> WorkerLoad:
        """How busy it is now."""
        scheduler = self.worker.scheduler
        with self.worker.lock:
            return WorkerLoad(
                num_free_blocks=scheduler.pool.num_free,
                num_running=scheduler.num_running,
                num_waiting=scheduler.num_waiting,
                num_waiting_tokens=scheduler.num_waiting_tokens,
            )

    def abort(self, request_id: RequestId, error: TandemError) -> None:
        """Ends a request in any phase."""
        self.worker.abort(request_id, error)

    def abort_choice(self, request_id: RequestId, choice: int) -> None:
        """All choices are computed as one here: nothing to stop."""

    def start_draining(self) -> None:
        """Refuses new requests from now on."""
        self.worker.start_draining()

    async def wait_idle(self) -> None:
        """Returns when nothing runs, waits or moves."""
        await self.worker.wait_idle()

    async def clear_device_tier(self) -> int:
        """Forgets the names of blocks that no request uses; how many."""
        return await self.worker.write_back.clear()

    def end_requests(self) -> None:
        """Ends those that have not ended, with an error that says why."""
        self.worker.end_requests()

    async def close(self) -> None:
        """Ends everything that still runs and frees all memory."""
        await self.worker.close()


def _target_of(request: worker_pb2.PrefillRequest) -> Target | None:
    if not request.HasField("handoff"):
        return None
    handoff = request.handoff
    return Target(
        handoff_id=HandoffId(handoff.handoff_id),
        worker_id=WorkerId(handoff.decode_worker_id),
        address=handoff.decode_address,
        epoch=Epoch(handoff.decode_epoch),
    )


async def _events(job: Job) -> AsyncIterator[worker_pb2.PrefillEvent]:
    while True:
        event = await job.events.get()
        if isinstance(event, TandemError):
            raise event
        yield event
        if event.WhichOneof("event") == "done":
            return
