"""Calls to a peer whose process stands still: they end, though its connections stay open."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.rpc.client import open_channel

PEER = """
import asyncio
from tandem.rpc.server import start_server

async def serve():
    server = await start_server("127.0.0.1", 0, lambda server: None, ())
    await server.set_serving(True)
    print(server.address, flush=True)
    await asyncio.Event().wait()

asyncio.run(serve())
"""


@contextmanager
def peer() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process of its own, and its address."""
    with subprocess.Popen([sys.executable, "-c", PEER], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def test_a_call_to_a_peer_that_stands_still_ends_as_unavailable() -> None:
    async def scenario() -> None:
        with peer() as (process, address):
            async with open_channel(address, silence_s=1.0) as channel, asyncio.timeout(60):
                watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
                answer = await watch.read()
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
                os.kill(process.pid, signal.SIGSTOP)
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await watch.read()
                assert error.value.code() is grpc.StatusCode.UNAVAILABLE

    asyncio.run(scenario())


def test_a_call_to_a_silent_peer_that_lives_does_not_end() -> None:
    async def scenario() -> None:
        with peer() as (_, address):
            async with open_channel(address, silence_s=0.5) as channel:
                watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
                await watch.read()
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(5.0):
                        await watch.read()

    asyncio.run(scenario())
