"""What the command line asks of a router: streams of text, and the cluster's status. Imports neither Ray nor torch."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import grpc

from tandem.errors import ClusterError, ConfigError, TandemError
from tandem.rpc.client import open_channel
from tandem.rpc.status import CODE_KEY, from_rpc_error
from tandem.rpc.tandem.v1 import common_pb2, inference_pb2, inference_pb2_grpc

DEFAULT_ENDPOINT = "127.0.0.1:50051"
ENDPOINT_VARIABLE = "TANDEM_ENDPOINT"


def default_endpoint() -> str:
    """$TANDEM_ENDPOINT, else where `tandem up` listens by default."""
    return os.environ.get(ENDPOINT_VARIABLE) or DEFAULT_ENDPOINT


def make_sampling(
    *, max_tokens: int | None = None, temperature: float | None = None, seed: int | None = None
) -> common_pb2.SamplingParams:
    """Fields that are None take the router's defaults."""
    return common_pb2.SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)


def as_tandem_error(error: grpc.aio.AioRpcError, endpoint: str) -> TandemError:
    """The router's typed error, or ClusterError with what to do when no router was reached."""
    typed = CODE_KEY in dict(error.trailing_metadata() or ())
    if "http1" in (error.details() or "").lower() and not typed:
        return ClusterError(f"{endpoint} answers HTTP, not gRPC: give the gRPC port, 50051 unless it was changed")
    if error.code() is grpc.StatusCode.UNAVAILABLE and not typed:
        return ClusterError(f"no router answers at {endpoint}; start one with `tandem up` or give --endpoint HOST:PORT")
    return from_rpc_error(error)


class Client:
    """A connection to one router; an async context manager. Methods raise TandemError, a URL as `endpoint` does too."""

    def __init__(self, endpoint: str) -> None:
        if "://" in endpoint:
            raise ConfigError(
                f"the endpoint is HOST:PORT of the gRPC port, 50051 unless it was changed; got the URL {endpoint!r}"
            )
        self._endpoint = endpoint

    async def __aenter__(self) -> Client:
        self._channel = open_channel(self._endpoint)
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._admin = inference_pb2_grpc.AdminStub(self._channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    def generate(
        self, prompt: str, sampling: common_pb2.SamplingParams
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Continues a text. Closing the iterator cancels the request."""
        return self._stream(
            self._inference.Generate(inference_pb2.GenerateRequest(text=prompt, sampling=sampling))
        )

    def chat(
        self, messages: Sequence[inference_pb2.ChatMessage], sampling: common_pb2.SamplingParams
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Answers a conversation. Closing the iterator cancels the request."""
        return self._stream(self._inference.Chat(inference_pb2.ChatRequest(messages=messages, sampling=sampling)))

    async def _stream(
        self, call: grpc.aio.UnaryStreamCall[Any, inference_pb2.GenerateResponse]
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        try:
            async for response in call:
                yield response
        except grpc.aio.AioRpcError as exc:
            raise as_tandem_error(exc, self._endpoint) from exc
        finally:
            call.cancel()

    async def status(self, *, timeout_s: float = 10.0) -> inference_pb2.ClusterStatus:
        """The router's view of the cluster."""
        try:
            return await self._admin.GetClusterStatus(inference_pb2.GetClusterStatusRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as exc:
            raise as_tandem_error(exc, self._endpoint) from exc

    async def set_pool_sizes(self, *, prefill: int | None, decode: int | None, timeout_s: float = 10.0) -> None:
        """Asks for sizes; None leaves a pool as it is."""
        request = inference_pb2.SetPoolSizesRequest(prefill=prefill, decode=decode)
        try:
            await self._admin.SetPoolSizes(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as exc:
            raise as_tandem_error(exc, self._endpoint) from exc

    async def drain_worker(self, worker_id: str, *, timeout_s: float = 10.0) -> None:
        """Asks that a worker be taken out."""
        try:
            await self._admin.DrainWorker(inference_pb2.DrainWorkerRequest(worker_id=worker_id), timeout=timeout_s)
        except grpc.aio.AioRpcError as exc:
            raise as_tandem_error(exc, self._endpoint) from exc

    async def restart_pool(self, role: str, *, timeout_s: float = 10.0) -> int:
        """Asks that every worker of a pool be replaced; the generation that the new ones will have."""
        try:
            answer = await self._admin.RestartPool(inference_pb2.RestartPoolRequest(role=role), timeout=timeout_s)
        except grpc.aio.AioRpcError as exc:
            raise as_tandem_error(exc, self._endpoint) from exc
        return answer.generation

    async def models(self, *, timeout_s: float = 10.0) -> list[inference_pb2.Model]:
        """What the router serves."""
        try:
            response = await self._inference.ListModels(inference_pb2.ListModelsRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as exc:
            raise as_tandem_error(exc, self._endpoint) from exc
        return list(response.models)
