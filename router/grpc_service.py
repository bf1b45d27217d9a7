"""The gRPC face of the router: tandem.v1.Inference and tandem.v1.Admin. Translates; the frontend does the work."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import grpc

from router.cache_admin import CacheAdmin
from router.cache_service import CacheService
from router.frontend import Frontend
from router.grpc_requests import conversation_from_proto, options_from_proto
from router.output import OutputDelta
from router.prompt import Prompt
from tandem.errors import InvalidRequest, WorkerUnavailable
from tandem.rpc.convert import finish_reason_to_proto, logprobs_to_proto
from tandem.rpc.status import typed_errors
from tandem.rpc.tandem.v1 import inference_pb2, inference_pb2_grpc
from tandem.types import Role, WorkerId

SERVICE_NAMES = ("tandem.v1.Inference", "tandem.v1.Admin")

_Context = grpc.aio.ServicerContext[Any, Any]
_Asked = TypeVar("_Asked", inference_pb2.GenerateRequest, inference_pb2.ChatRequest)


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Streams are written, not yielded: so a cancelled call unwinds here, at once, and its request is stopped."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._created = int(time.time())

    async def Generate(  # type: ignore[override]
        self, request: inference_pb2.GenerateRequest, context: _Context
    ) -> None:
        """See the proto."""
        async with typed_errors(context):
            await self._stream(_prompt, request, context)

    async def Chat(self, request: inference_pb2.ChatRequest, context: _Context) -> None:  # type: ignore[override]
        """See the proto."""
        async with typed_errors(context):
            await self._stream(conversation_from_proto, request, context)

    async def Cancel(self, request: inference_pb2.CancelRequest, context: _Context) -> inference_pb2.CancelResponse:
        """See the proto."""
        async with typed_errors(context):
            self._frontend.cancel(request.request_id)
        return inference_pb2.CancelResponse()

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: _Context
    ) -> inference_pb2.ListModelsResponse:
        """See the proto. Empty while no worker is ready."""
        async with typed_errors(context):
            model = self._frontend.dispatcher.model()
        models = [] if model is None else [model]
        return inference_pb2.ListModelsResponse(
            models=[
                inference_pb2.Model(
                    name=m.name,
                    max_context_tokens=m.max_context_tokens,
                    created=self._created,
                    model_context_tokens=max(m.model_context_tokens, m.max_context_tokens),
                )
                for m in models
            ]
        )

    async def _stream(self, prompt_of: Callable[[_Asked], Prompt], request: _Asked, context: _Context) -> None:
        arrival_s = time.monotonic()
        with self._frontend.counting_refusals():
            prompt, options = prompt_of(request), options_from_proto(request.sampling)
            self._frontend.served_model(request.model)
        opened = self._frontend.open(
            prompt,
            options,
            request_id=request.request_id,
            timeout_s=request.timeout_s,
            arrival_s=arrival_s,
        )
        async with await opened as stream:
            begun: set[int] = set()
            async for delta in stream:
                response = _response(stream.request.request_id, delta)
                if delta.choice not in begun:
                    begun.add(delta.choice)
                    response.prompt_logprobs.extend(map(logprobs_to_proto, stream.prompt_logprobs or ()))
                await context.write(response)


class Admin(Protocol):
    """Who carries out what operators ask; `router.admin.PoolAdmin`."""

    @property
    def cache(self) -> CacheAdmin | None:
        """Who does so for the caches."""

    async def set_sizes(self, sizes: dict[Role, int]) -> inference_pb2.PoolSizes:
        """Changes desired sizes."""

    async def drain(self, worker_id: WorkerId) -> None:
        """Takes one worker out."""

    async def restart(self, role: str) -> int:
        """Replaces a pool's workers."""

    async def status(self) -> inference_pb2.ClusterStatus:
        """The whole cluster."""


class AdminService(CacheService):
    """Translates operators' calls. Without an `admin` only the status is known, from the dispatcher."""

    def __init__(self, frontend: Frontend, admin: Admin | None) -> None:
        super().__init__(frontend, None if admin is None else admin.cache)
        self._admin = admin

    def _pools(self) -> Admin:
        if self._admin is None:
            raise WorkerUnavailable("this router has no pools to administer")
        return self._admin

    async def GetClusterStatus(
        self, request: inference_pb2.GetClusterStatusRequest, context: _Context
    ) -> inference_pb2.ClusterStatus:
        """See the proto."""
        async with typed_errors(context):
            asked = self._frontend.dispatcher if self._admin is None else self._admin
            status = await asked.status()
            status.is_draining = self._frontend.is_draining
        return status

    async def SetPoolSizes(
        self, request: inference_pb2.SetPoolSizesRequest, context: _Context
    ) -> inference_pb2.PoolSizes:
        """See the proto."""
        async with typed_errors(context):
            return await self._pools().set_sizes(
                {role: getattr(request, role) for role in Role if request.HasField(role.value)}
            )

    async def DrainWorker(
        self, request: inference_pb2.DrainWorkerRequest, context: _Context
    ) -> inference_pb2.DrainWorkerResponse:
        """See the proto."""
        async with typed_errors(context):
            await self._pools().drain(WorkerId(request.worker_id))
        return inference_pb2.DrainWorkerResponse()

    async def RestartPool(
        self, request: inference_pb2.RestartPoolRequest, context: _Context
    ) -> inference_pb2.RestartPoolResponse:
        """See the proto."""
        async with typed_errors(context):
            return inference_pb2.RestartPoolResponse(generation=await self._pools().restart(request.role))


def register(server: grpc.aio.Server, frontend: Frontend, admin: Admin | None = None) -> None:
    """Adds both services to a server that has not started."""
    inference_pb2_grpc.add_InferenceServicer_to_server(InferenceService(frontend), server)
    inference_pb2_grpc.add_AdminServicer_to_server(AdminService(frontend, admin), server)


def _prompt(request: inference_pb2.GenerateRequest) -> Prompt:
    which = request.WhichOneof("prompt")
    if which is None:
        raise InvalidRequest("prompt is empty: set text or token_ids", param="prompt")
    return request.text if which == "text" else tuple(request.token_ids.ids)


def _response(request_id: str, delta: OutputDelta) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(
        request_id=request_id,
        choice=delta.choice,
        text=delta.text,
        tool_calls=[
            inference_pb2.ToolCall(index=call.index, id=call.call_id, name=call.name, arguments=call.arguments)
            for call in delta.tool_calls
        ],
        token_ids=delta.token_ids,
        logprobs=map(logprobs_to_proto, delta.logprobs),
        finish_reason=finish_reason_to_proto(delta.finish_reason),
        usage=delta.usage,
        timings=delta.timings,
    )
