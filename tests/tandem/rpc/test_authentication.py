"""A worker's port refuses every call without its cluster's code; on a real server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.errors import ForeignCall
from tandem.rpc.authentication import AUTH_KEY, LIFETIME_S, CallGuard, SignedChannel, call_code
from tandem.rpc.client import open_channel
from tandem.rpc.server import RpcServer, start_server
from tandem.rpc.status import from_rpc_error
from tandem.rpc.tandem.v1 import worker_pb2, worker_pb2_grpc
from tandem.secret import ClusterKey
from tests.factories import CLUSTER_KEY

METHOD = "/tandem.v1.Worker/Abort"
OTHER_KEY = ClusterKey(b"o" * 32)


class Open(worker_pb2_grpc.WorkerServicer, worker_pb2_grpc.DecodeWorkerServicer):
    """Answers whatever reaches it."""

    async def Abort(self, request: Any, context: Any) -> worker_pb2.AbortResponse:
        return worker_pb2.AbortResponse()

    async def Decode(self, request: Any, context: Any) -> AsyncIterator[worker_pb2.DecodeEvent]:
        yield worker_pb2.DecodeEvent()

    async def Handoff(self, request_iterator: Any, context: Any) -> AsyncIterator[worker_pb2.DestinationMessage]:
        async for _ in request_iterator:
            yield worker_pb2.DestinationMessage()


@asynccontextmanager
async def guarded() -> AsyncIterator[RpcServer]:
    def register(server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_WorkerServicer_to_server(Open(), server)
        worker_pb2_grpc.add_DecodeWorkerServicer_to_server(Open(), server)

    names = ["tandem.v1.Worker", "tandem.v1.DecodeWorker"]
    server = await start_server("127.0.0.1", 0, register, names, guard=CallGuard(CLUSTER_KEY))
    try:
        yield server
    finally:
        await server.stop(0.0)


async def call_every_shape(channel: grpc.aio.Channel) -> list[BaseException | None]:
    """How a unary, a streaming and a bidirectional call end."""
    decode = worker_pb2_grpc.DecodeWorkerStub(channel)

    async def drained(call: Any) -> None:
        async for _ in call:
            pass

    calls: list[Any] = [
        worker_pb2_grpc.WorkerStub(channel).Abort(worker_pb2.AbortRequest()),
        drained(decode.Decode(worker_pb2.DecodeRequest())),
        drained(decode.Handoff(iter([worker_pb2.SourceMessage()]))),
    ]
    return [result if isinstance(result, BaseException) else None for result in [await ended(c) for c in calls]]


async def ended(call: Any) -> BaseException | None:
    try:
        await call
    except grpc.aio.AioRpcError as exc:
        return from_rpc_error(exc)
    return None


def test_calls_of_the_same_cluster_pass_in_every_shape() -> None:
    async def body() -> list[BaseException | None]:
        async with guarded() as server, open_channel(server.address) as plain:
            return await call_every_shape(SignedChannel(plain, key=CLUSTER_KEY, address=server.address))

    assert asyncio.run(body()) == [None, None, None]


@pytest.mark.parametrize("key", [None, OTHER_KEY], ids=["no code", "another key"])
def test_other_calls_are_refused_in_every_shape(key: ClusterKey | None) -> None:
    async def body() -> list[BaseException | None]:
        async with guarded() as server:
            plain = open_channel(server.address)
            async with plain if key is None else SignedChannel(plain, key=key, address=server.address) as channel:
                return await call_every_shape(channel)

    assert [type(error) for error in asyncio.run(body())] == [ForeignCall] * 3


def test_health_needs_no_code() -> None:
    async def body() -> int:
        async with guarded() as server, open_channel(server.address) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            return int(answer.status)

    assert asyncio.run(body()) == health_pb2.HealthCheckResponse.NOT_SERVING


def test_a_code_is_good_once() -> None:
    async def body() -> list[BaseException | None]:
        async with guarded() as server, open_channel(server.address) as channel:
            code = call_code(CLUSTER_KEY, method=METHOD, address=server.address, now=time.time())
            stub = worker_pb2_grpc.WorkerStub(channel)
            return [
                await ended(stub.Abort(worker_pb2.AbortRequest(), metadata=((AUTH_KEY, code),))) for _ in range(2)
            ]

    first, second = asyncio.run(body())
    assert first is None
    assert isinstance(second, ForeignCall)
    assert "used before" in second.message


def made(method: str = METHOD, address: str = "here:1", now: float = 1000.0) -> str:
    return call_code(CLUSTER_KEY, method=method, address=address, now=now)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (lambda: made(method="/tandem.v1.Worker/Drain"), "another"),
        (lambda: made(address="there:1"), "another"),
        (lambda: made(now=1000.0 - 2 * LIFETIME_S), "expired"),
        (lambda: made(now=1000.0 + 2 * LIFETIME_S), "expired"),
        (lambda: made()[:-1], "another"),
        (lambda: "9" * 30 + made(), "another"),
        (lambda: "nonsense", "another"),
        (lambda: "", "without"),
    ],
)
def test_a_code_for_something_else_is_refused(code: Callable[[], str], why: str) -> None:
    guard = CallGuard(CLUSTER_KEY, clock=lambda: 1000.0)
    guard.address = "here:1"
    with pytest.raises(ForeignCall, match=why):
        guard.check(METHOD, code())
    guard.check(METHOD, made())
