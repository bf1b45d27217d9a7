"""The control service that workers of both pools serve: status, abort, drain, clear."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import grpc

from tandem.errors import DeadlineExceeded, RequestCancelled, TandemError
from tandem.rpc.status import typed_errors
from tandem.rpc.tandem.v1 import inference_pb2, worker_pb2, worker_pb2_grpc
from tandem.types import RequestId

Context = grpc.aio.ServicerContext[Any, Any]


class WorkerControl(Protocol):
    """What the control service needs of a worker."""

    def status(self) -> inference_pb2.WorkerStatus:
        """What the worker is doing now."""

    def abort(self, request_id: RequestId, error: TandemError) -> None:
        """Ends a request in any phase; unknown ids are fine."""

    def abort_choice(self, request_id: RequestId, choice: int) -> None:
        """Ends one choice of a request, others go on; unknown ones are fine."""

    def start_draining(self) -> None:
        """Refuses new requests from now on."""

    async def wait_idle(self) -> None:
        """Returns when nothing runs, waits or moves."""

    async def clear_device_tier(self) -> int:
        """Forgets the names of blocks that no request uses; how many."""


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """Serves `worker`; see worker.proto."""

    def __init__(self, worker: WorkerControl) -> None:
        self._worker = worker

    async def GetStatus(self, request: worker_pb2.GetStatusRequest, context: Context) -> inference_pb2.WorkerStatus:
        """What the worker is doing now."""
        return self._worker.status()

    async def Abort(self, request: worker_pb2.AbortRequest, context: Context) -> worker_pb2.AbortResponse:
        """Ends a request, or one choice of it."""
        if request.HasField("choice"):
            self._worker.abort_choice(RequestId(request.request_id), request.choice)
            return worker_pb2.AbortResponse()
        self._worker.abort(RequestId(request.request_id), RequestCancelled("the request was aborted"))
        return worker_pb2.AbortResponse()

    async def Drain(self, request: worker_pb2.DrainRequest, context: Context) -> worker_pb2.DrainResponse:
        """Stops admission and waits."""
        async with typed_errors(context):
            self._worker.start_draining()
            try:
                async with asyncio.timeout(request.timeout_s):
                    await self._worker.wait_idle()
            except TimeoutError as exc:
                raise DeadlineExceeded(f"still busy after {request.timeout_s:g} s of draining") from exc
        return worker_pb2.DrainResponse()

    async def ClearDeviceTier(
        self, request: worker_pb2.ClearDeviceTierRequest, context: Context
    ) -> worker_pb2.ClearDeviceTierResponse:
        """Forgets what is only cached."""
        async with typed_errors(context):
            num_blocks = await self._worker.clear_device_tier()
        return worker_pb2.ClearDeviceTierResponse(num_blocks=num_blocks)
