"""What the command line asks of a router: streams of text, and the cluster's status. Imports neither Ray nor torch."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.access import Access
from tandem.errors import ClusterError, TandemError, Unauthenticated
from tandem.rpc.client import open_channel
from tandem.rpc.status import CODE_KEY, from_rpc_error
from tandem.rpc.tandem.v1 import common_pb2, inference_pb2, inference_pb2_grpc


def make_sampling(
    *,
    max_tokens: int | None = None,
    temperature: float | None = None,
    seed: int | None = None,
    priority: int | None = None,
) -> common_pb2.SamplingParams:
    """Fields that are None take the router's defaults."""
    return common_pb2.SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed, priority=priority)


def as_tandem_error(error: grpc.aio.AioRpcError, endpoint: str) -> TandemError:
    """The router's typed error, or ClusterError with what to do when no router was reached."""
    typed = _is_typed(error)
    if "http1" in (error.details() or "").lower() and not typed:
        return ClusterError(f"{endpoint} answers HTTP, not gRPC: give the gRPC port, 50051 unless it was changed")
    if "handshake" in (error.details() or "").lower() and not typed:
        return ClusterError(f"no TLS connection to {endpoint}: {_handshake_problem(error.details() or '')}")
    if (error.details() or "").endswith("Socket closed") and not typed:
        return ClusterError(
            f"{endpoint} closed the connection at once: does it want TLS (--tls-ca-file), or a certificate "
            "of ours (--tls-cert-file)?"
        )
    if error.code() is grpc.StatusCode.UNAVAILABLE and not typed:
        return ClusterError(f"no router answers at {endpoint}; start one with `tandem up` or give --endpoint HOST:PORT")
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        return Unauthenticated(f"{endpoint}: {error.details()}; give --api-key or $TANDEM_API_KEY")
    return from_rpc_error(error)


def _is_typed(error: grpc.aio.AioRpcError) -> bool:
    """Whether a router said it, and not gRPC."""
    return CODE_KEY in dict(error.trailing_metadata() or ())


def _handshake_problem(details: str) -> str:
    """What gRPC says of it, in words that help."""
    if "CERTIFICATE_VERIFY_FAILED" in details:
        return "its certificate is not signed by a CA that we trust; give --tls-ca-file"
    if "WRONG_VERSION_NUMBER" in details:
        return "it does not use TLS; leave out the options for it"
    return details


class Client:
    """A connection to one router; an async context manager. A text is the endpoint of one that asks for nothing.

    Methods raise TandemError; so does a URL as endpoint.
    """

    def __init__(self, access: Access | str) -> None:
        self._access = Access(endpoint=access) if isinstance(access, str) else access
        self._endpoint = self._access.endpoint
        self._metadata = self._access.metadata()

    async def __aenter__(self) -> Client:
        access = self._access
        self._channel = open_channel(self._endpoint, access.credentials(), server_name=access.tls_server_name)
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._admin = inference_pb2_grpc.AdminStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    def generate(
        self, prompt: str, sampling: common_pb2.SamplingParams
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Continues a text. Closing the iterator cancels the request."""
        request = inference_pb2.GenerateRequest(text=prompt, sampling=sampling)
        return self._stream(self._inference.Generate(request, metadata=self._metadata))

    def chat(
        self, messages: Sequence[inference_pb2.ChatMessage], sampling: common_pb2.SamplingParams
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Answers a conversation. Closing the iterator cancels the request."""
        request = inference_pb2.ChatRequest(messages=messages, sampling=sampling)
        return self._stream(self._inference.Chat(request, metadata=self._metadata))

    async def _stream(
        self, call: grpc.aio.UnaryStreamCall[Any, inference_pb2.GenerateResponse]
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        begun = False
        try:
            async for response in call:
                begun = True
                yield response
        except grpc.aio.AioRpcError as exc:
            if begun and exc.code() is grpc.StatusCode.UNAVAILABLE and not _is_typed(exc):
                raise ClusterError(f"the router at {self._endpoint} went away before the answer was whole") from exc
            raise as_tandem_error(exc, self._endpoint) from exc
        finally:
            call.cancel()

    async def status(self, *, timeout_s: float = 10.0) -> inference_pb2.ClusterStatus:
        """The router's view of the cluster."""
        try:
            return await self._admin.GetClusterStatus(
                inference_pb2.GetClusterStatusRequest(), timeout=timeout_s, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as exc:
            raise as_tandem_error(exc, self._endpoint) from exc

    async def set_pool_sizes(self, *, prefill: int | None, decode: int | None, timeout_s: float = 10.0) -> None:
        """Asks for sizes; None leaves a pool as it is."""
        request = inference_pb2.SetPoolSizesRequest(prefill=prefill, decode=decode)
        try:
            await self._admin.SetPoolSizes(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as exc:
            raise as_tandem_error(exc, self._endpoint) from exc

    async def drain_worker(self, worker_id: str, *, timeout_s: float = 10.0) -> None:
        """Asks that a worker be taken out."""
        request = inference_pb2.DrainWorkerRequest(worker_id=worker_id)
        try:
            await self._admin.DrainWorker(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as exc:
            raise as_tandem_error(exc, self._endpoint) from exc

    async def restart_pool(self, role: str, *, timeout_s: float = 10.0) -> int:
        """Asks that every worker of a pool be replaced; the generation that the new ones will have."""
        request = inference_pb2.RestartPoolRequest(role=role)
        try:
            answer = await self._admin.RestartPool(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as exc:
            raise as_tandem_error(exc, self._endpoint) from exc
        return answer.generation

    async def health(self, service: str, *, timeout_s: float = 10.0) -> str:
        """What a health check of `service` answers: "SERVING" or another word of gRPC's."""
        try:
            answer = await self._health.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.aio.AioRpcError as exc:
            raise as_tandem_error(exc, self._endpoint) from exc
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

    async def models(self, *, timeout_s: float = 10.0) -> list[inference_pb2.Model]:
        """What the router serves."""
        request = inference_pb2.ListModelsRequest()
        try:
            response = await self._inference.ListModels(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as exc:
            raise as_tandem_error(exc, self._endpoint) from exc
        return list(response.models)
