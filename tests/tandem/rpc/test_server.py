"""The gRPC server on a real port: health, reflection, typed errors across the wire, drain."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.errors import (
    BY_CODE,
    WIRE_STATUS,
    ClusterError,
    InvalidRequest,
    Overloaded,
    RequestCancelled,
    RequestError,
    TandemError,
    WorkerUnavailable,
)
from tandem.rpc.client import open_channel
from tandem.rpc.server import RpcServer, format_address, start_server
from tandem.rpc.status import CODE_KEY, from_rpc_error, typed_errors
from tandem.rpc.tandem.v1 import inference_pb2, inference_pb2_grpc

ADMIN = "tandem.v1.Admin"


class ScriptedAdmin(inference_pb2_grpc.AdminServicer):
    """Fails with `error`, or waits for `release` and answers."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.entered = asyncio.Event()
        self.release = asyncio.Event()

    async def GetClusterStatus(self, request, context):  # type: ignore[no-untyped-def]
        async with typed_errors(context):
            if self.error is not None:
                raise self.error
            self.entered.set()
            await self.release.wait()
            return inference_pb2.ClusterStatus(model="m")


async def serve(admin: ScriptedAdmin) -> RpcServer:
    def register(server: grpc.aio.Server) -> None:
        inference_pb2_grpc.add_AdminServicer_to_server(admin, server)

    return await start_server("127.0.0.1", 0, register, [ADMIN])


async def call(server: RpcServer) -> inference_pb2.ClusterStatus:
    async with open_channel(server.address) as channel:
        return await inference_pb2_grpc.AdminStub(channel).GetClusterStatus(inference_pb2.GetClusterStatusRequest())


async def failed_call(error: BaseException) -> grpc.aio.AioRpcError:
    server = await serve(ScriptedAdmin(error))
    try:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(server)
        return caught.value
    finally:
        await server.stop(0)


async def health_of(server: RpcServer, service: str = "") -> int:
    async with open_channel(server.address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        return (await health_pb2_grpc.HealthStub(channel).Check(request)).status


@pytest.mark.parametrize("cls", list(WIRE_STATUS))
def test_every_typed_error_crosses_the_wire_as_itself(cls):
    error = cls("löst nicht", param="fïeld", retry_after_s=1.5)
    failure = asyncio.run(failed_call(error))
    assert failure.code() is grpc.StatusCode[WIRE_STATUS[cls].grpc]
    back = from_rpc_error(failure)
    assert type(back) is BY_CODE[cls.code]
    assert isinstance(back, cls) or cls is RequestError
    assert (back.message, back.param, back.retry_after_s) == ("löst nicht", "f\\xefeld", 1.5)


def test_the_code_of_a_wrong_field_comes_back_as_invalid_request():
    assert BY_CODE["invalid_request"] is InvalidRequest


def test_a_bug_in_a_handler_is_internal_and_logged(caplog):
    failure = asyncio.run(failed_call(ZeroDivisionError("secret")))
    assert failure.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in (failure.details() or "")
    assert "ZeroDivisionError" in caplog.text
    assert type(from_rpc_error(failure)) is TandemError


@pytest.mark.parametrize(
    ("code", "cls"),
    [
        (grpc.StatusCode.UNAVAILABLE, WorkerUnavailable),
        (grpc.StatusCode.CANCELLED, RequestCancelled),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, Overloaded),
        (grpc.StatusCode.UNIMPLEMENTED, TandemError),
    ],
)
def test_a_status_without_a_code_becomes_the_nearest_error(code, cls):
    error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(("retry-after", "soon")), details="x")
    assert type(from_rpc_error(error)) is cls
    assert from_rpc_error(error).retry_after_s is None


def test_health_follows_set_serving():
    async def run() -> list[int]:
        server = await serve(ScriptedAdmin())
        seen = [await health_of(server)]
        await server.set_serving(True)
        seen += [await health_of(server), await health_of(server, ADMIN)]
        await server.set_serving(False)
        seen.append(await health_of(server))
        await server.stop(0)
        return seen

    assert asyncio.run(run()) == [2, 1, 1, 2]


def test_stop_lets_a_running_call_end():
    async def run() -> str:
        admin = ScriptedAdmin()
        server = await serve(admin)
        running = asyncio.create_task(call(server))
        await admin.entered.wait()
        stopping = asyncio.create_task(server.stop(30))
        await asyncio.sleep(0)
        admin.release.set()
        reply = await running
        await stopping
        return reply.model

    assert asyncio.run(run()) == "m"


def test_stop_cancels_what_outlives_the_grace():
    async def run() -> grpc.StatusCode:
        admin = ScriptedAdmin()
        server = await serve(admin)
        running = asyncio.create_task(call(server))
        await admin.entered.wait()
        await server.stop(0.05)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running
        return caught.value.code()

    assert asyncio.run(run()) in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


def test_a_port_in_use_is_a_cluster_error():
    async def run() -> None:
        first = await serve(ScriptedAdmin())
        try:
            with pytest.raises(ClusterError, match=str(first.port)):
                await start_server("127.0.0.1", first.port, lambda server: None, [])
        finally:
            await first.stop(0)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("host", "address"), [("0.0.0.0", "127.0.0.1:1"), ("::", "[::1]:1"), ("::1", "[::1]:1"), ("box", "box:1")]
)
def test_addresses_can_be_dialled(host, address):
    assert format_address(host, 1) == address


@pytest.mark.parametrize(
    ("details", "plain"),
    [
        ("Stream removed (recvmsg:Connection reset by peer)", "connection reset"),
        ("failed to connect to all addresses: ipv4:127.0.0.1:1: Connection refused (111)", "connection refused"),
        ("Socket closed", "connection closed"),
        ("Stream removed", "connection lost"),
    ],
)
def test_a_lost_connection_is_said_in_plain_words(details: str, plain: str) -> None:
    none = grpc.aio.Metadata()
    lost = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, none, none, details)
    assert (type(from_rpc_error(lost)), from_rpc_error(lost).message) == (WorkerUnavailable, plain)
    said = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, none, grpc.aio.Metadata((CODE_KEY, "overloaded")), details)
    assert from_rpc_error(said).message == details
