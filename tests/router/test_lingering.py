"""A router that leaves under load: clients that keep their connections end up at another one, and lose nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc
import httpx
import pytest

from tandem.config import RouterConfig
from tandem.errors import ConfigError
from tandem.rpc.client import open_channel
from tandem.rpc.tandem.v1 import inference_pb2_grpc
from tests.e2e.live import generate
from tests.proxy import Proxy
from tests.router_harness import running, runs_async, saying

LINGER_S = 3.0
"""Half of it is left for a machine that is busy with other things."""
TEXT = "word " * 20
NUM_CLIENTS = 4


@asynccontextmanager
async def asking(ask: Callable[[], Awaitable[None]]) -> AsyncIterator[list[str]]:
    """Some clients that ask again and again; what went wrong for them."""
    over, errors = asyncio.Event(), list[str]()

    async def again() -> None:
        while not over.is_set():
            try:
                await ask()
            except (grpc.aio.AioRpcError, httpx.HTTPError, AssertionError) as exc:
                errors.append(repr(exc))

    clients = [asyncio.create_task(again()) for _ in range(NUM_CLIENTS)]
    try:
        yield errors
    finally:
        over.set()
        await asyncio.gather(*clients)


@runs_async
async def test_no_request_of_clients_that_keep_their_connections_is_lost() -> None:
    stayed = saying(TEXT)
    async with (
        running(saying(TEXT), linger_s=LINGER_S) as leaving,
        running(stayed) as staying,
        Proxy.to(leaving.grpc_address) as grpc_service,
        Proxy.to(leaving.http_address) as http_service,
        open_channel(grpc_service.address) as channel,
        httpx.AsyncClient(trust_env=False, verify=False, base_url=f"http://{http_service.address}") as http,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)

        async def over_grpc() -> None:
            assert (await generate(stub, "Hi", max_tokens=64)).text == TEXT

        async def over_http() -> None:
            reply = await http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 64})
            assert reply.json()["choices"][0]["text"] == TEXT

        async with asking(over_grpc) as grpc_errors, asking(over_http) as http_errors:
            while leaving.frontend.num_running < NUM_CLIENTS:  # noqa: ASYNC110  it announces nothing
                await asyncio.sleep(0.01)
            grpc_service.target, http_service.target = staying.grpc_address, staying.http_address
            await leaving.stop(30)
        assert (grpc_errors, http_errors) == ([], [])
        assert len(stayed.dispatches) > 2 * NUM_CLIENTS


@runs_async
async def test_while_it_lingers_it_is_not_ready_and_serves() -> None:
    async with running(saying("ok"), linger_s=0.5) as router, httpx.AsyncClient(trust_env=False, verify=False) as http:
        stopping = asyncio.create_task(router.stop(30))
        await asyncio.sleep(0)
        reply = await http.post(f"{router.http_url}/v1/completions", json={"prompt": "Hi"})
        assert (reply.status_code, reply.headers["connection"]) == (200, "close")
        assert not stopping.done()
        await stopping


def test_the_time_has_bounds() -> None:
    with pytest.raises(ConfigError, match=r"router\.linger_s must be 0 to 600"):
        RouterConfig(linger_s=-1)
