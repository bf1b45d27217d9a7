"""Starting and stopping a whole router."""

from __future__ import annotations

import asyncio
import socket

import httpx
import pytest

from router.app import serve, serve_frontend
from tandem.config import ClusterConfig, RouterConfig
from tandem.errors import ClusterError
from tandem.model.files import DEFAULT_MODEL, resolve_model
from tests.router_harness import make_frontend, running, runs_async, saying, scripted


def config(http_port: int = 0, grpc_port: int = 0) -> ClusterConfig:
    return ClusterConfig(router=RouterConfig(http_port=http_port, grpc_port=grpc_port))


@runs_async
async def test_serve_reads_the_tokenizer_and_answers():
    directory = resolve_model(DEFAULT_MODEL).tokenizer_dir
    router = await serve(config=config(), dispatcher=saying("Hello"), tokenizer_dir=directory)
    try:
        async with httpx.AsyncClient(trust_env=False, verify=False) as http:
            response = await http.post(f"http://{router.http_address}/v1/completions", json={"prompt": "a"})
    finally:
        await router.stop(0)
    assert response.json()["choices"][0]["text"] == "Hello"


@pytest.mark.parametrize("which", ["http_port", "grpc_port"])
def test_a_port_in_use_is_an_error_and_leaves_nothing_open(which):
    @runs_async
    async def run():
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            with pytest.raises(ClusterError, match=str(port)):
                await serve_frontend(make_frontend(saying("ok")), config=config(**{which: port}))

    run()


@runs_async
async def test_stopping_lets_a_running_answer_end_and_closes_both_ports():
    dispatcher = scripted([20], repeat=True, stall_at=1)
    async with running(dispatcher) as router, httpx.AsyncClient(trust_env=False, verify=False) as http:
        url = f"http://{router.http_address}/v1/completions"
        answer = asyncio.create_task(http.post(url, json={"prompt": "a", "max_tokens": 3}))
        await dispatcher.arrived.wait()
        await dispatcher.dispatches[0].stalled.wait()
        stopping = asyncio.create_task(router.stop(30))
        await asyncio.sleep(0)
        dispatcher.dispatches[0].release.set()
        assert (await answer).json()["usage"]["completion_tokens"] == 3
        await stopping
        with pytest.raises(httpx.ConnectError):
            await http.post(url, json={"prompt": "a"})
    assert router.frontend.num_running == 0


@runs_async
async def test_stop_may_be_called_twice():
    async with running(saying("ok")) as router:
        await asyncio.gather(router.stop(0), router.stop(0))
