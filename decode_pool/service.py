"""The decode worker over gRPC: translates calls to `worker.DecodeWorker` and back."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from decode_pool.leg import Leg
from decode_pool.worker import DecodeWorker
from tandem.errors import HandoffFailed, RequestCancelled, TandemError
from tandem.observability.worker_readings import DecodeSample
from tandem.registry import WorkerLoad
from tandem.rpc.convert import decode_request_from_proto
from tandem.rpc.status import typed_errors
from tandem.rpc.tandem.v1 import inference_pb2, worker_pb2, worker_pb2_grpc
from tandem.rpc.worker_service import WorkerControl, WorkerServicer
from tandem.types import HandoffId, RequestId
from tandem.worker.grammars import compiled_grammar
from tandem.worker.host import WorkerFacts

Context = grpc.aio.ServicerContext[Any, Any]


class DecodeService(worker_pb2_grpc.DecodeWorkerServicer, WorkerControl):
    """A `HostedWorker`: the decode leg, the handoff's control stream, and control."""

    def __init__(self, worker: DecodeWorker, facts: WorkerFacts) -> None:
        self.worker = worker
        self.facts = facts
        self.metrics_url = ""
        worker.metrics.follow(self._sample)

    def register(self, server: grpc.aio.Server) -> None:
        """Adds its gRPC services."""
        worker_pb2_grpc.add_DecodeWorkerServicer_to_server(self, server)
        worker_pb2_grpc.add_WorkerServicer_to_server(WorkerServicer(self), server)

    def service_names(self) -> Sequence[str]:
        """Their full names."""
        return ("tandem.v1.DecodeWorker", "tandem.v1.Worker")

    async def Decode(
        self, request: worker_pb2.DecodeRequest, context: Context
    ) -> AsyncIterator[worker_pb2.DecodeEvent]:
        """The decode leg; see worker.proto."""
        async with typed_errors(context):
            asked = decode_request_from_proto(request, now=time.monotonic())
            grammar = await compiled_grammar(self.worker.executor.grammars, asked)
            leg = self.worker.open_leg(asked, HandoffId(request.handoff_id), grammar)
            try:
                yield worker_pb2.DecodeEvent(accepted=worker_pb2.DecodeAccepted())
                async for event in _events(leg):
                    yield event
            finally:
                self.worker.fail(leg, RequestCancelled("the router closed the decode leg"))

    async def Handoff(
        self, request_iterator: AsyncIterator[worker_pb2.SourceMessage], context: Context
    ) -> AsyncIterator[worker_pb2.DestinationMessage]:
        """One handoff's control stream; see worker.proto."""
        async with typed_errors(context):
            first = await anext(aiter(request_iterator), None)
            if first is None or first.WhichOneof("message") != "offer":
                raise HandoffFailed("a handoff begins with its offer")
            async for message in self.worker.handoff(first.offer, request_iterator):
                yield message

    # --- control

    @property
    def metrics(self) -> CollectorRegistry:
        """What it exports."""
        return self.worker.metrics.registry

    def _sample(self) -> DecodeSample:
        arrived = self.worker.receiver.arrived
        with self.worker.lock:
            return DecodeSample(
                status=self._status(),
                num_unreserved=self.worker.scheduler.num_unreserved,
                num_swapped=self.worker.scheduler.num_swapped,
                num_received_bytes=arrived.num_bytes,
                num_received_messages=arrived.num_messages,
                num_refused_messages=arrived.num_refused,
                num_nacked_messages=arrived.num_nacked,
                num_forged_messages=arrived.num_forged,
            )

    def status(self) -> inference_pb2.WorkerStatus:
        """What this worker is doing now; its address is the caller's knowledge."""
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
            num_handoffs=len(worker.receiver),
            pid=os.getpid(),
            cores=sorted(os.sched_getaffinity(0)),
            num_iterations=worker.num_iterations,
            num_tokens=worker.num_tokens,
            metrics_url=self.metrics_url,
            compute=self.facts.compute,
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
            )

    def abort(self, request_id: RequestId, error: TandemError) -> None:
        """Ends a request in any phase."""
        self.worker.abort(request_id, error)

    def abort_choice(self, request_id: RequestId, choice: int) -> None:
        """Ends one choice of a request."""
        self.worker.end_choice(request_id, choice)

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


async def _events(leg: Leg) -> AsyncIterator[worker_pb2.DecodeEvent]:
    while True:
        event = await leg.events.get()
        if isinstance(event, TandemError):
            raise event
        yield event
        if event.WhichOneof("event") == "done":
            return
