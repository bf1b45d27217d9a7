"""The metrics server on a real port, spoken to by a real HTTP client and by bad ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from tandem.errors import ClusterError
from tandem.observability.controller_metrics import ControllerMetrics
from tandem.observability.server import MetricsServer, serve_metrics
from tandem.types import Role


@asynccontextmanager
async def serving(registry: CollectorRegistry) -> AsyncIterator[MetricsServer]:
    server = await serve_metrics(registry, "127.0.0.1")
    try:
        yield server
    finally:
        await server.stop()


def get(
    registry: CollectorRegistry, path: str = "/metrics", *, method: str = "GET", accept: str = "*/*"
) -> httpx.Response:
    async def ask() -> httpx.Response:
        async with serving(registry) as server, httpx.AsyncClient(trust_env=False, verify=False) as http:
            url = server.url.replace("/metrics", path)
            return await http.request(method, url, headers={"accept": accept})

    return asyncio.run(ask())


async def raw(server: MetricsServer, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(data)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


def test_a_scrape_gets_the_text_format() -> None:
    metrics = ControllerMetrics()
    metrics.pool(Role.DECODE, desired=3, ready=2, draining=1, generation=4)
    metrics.action("start")
    response = get(metrics.registry)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert 'tandem_controller_desired_workers{role="decode"} 3.0' in response.text
    assert 'tandem_controller_actions_total{kind="start"} 1.0' in response.text


def test_who_asks_for_openmetrics_gets_it() -> None:
    response = get(ControllerMetrics().registry, accept="application/openmetrics-text; version=1.0.0")
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert response.text.endswith("# EOF\n")


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/", 404), ("POST", "/metrics", 405)])
def test_anything_else_is_refused(method: str, path: str, status: int) -> None:
    assert get(CollectorRegistry(), path, method=method).status_code == status


def test_a_head_request_has_no_body() -> None:
    response = get(ControllerMetrics().registry, method="HEAD")
    assert (response.status_code, response.content) == (200, b"")


def test_a_collector_that_fails_is_an_error_of_that_scrape_only() -> None:
    class Failing(Collector):
        def describe(self):  # type: ignore[no-untyped-def]
            return []

        def collect(self):  # type: ignore[no-untyped-def]
            raise RuntimeError("broken")

    registry = CollectorRegistry()
    registry.register(Failing())
    assert get(registry).status_code == 500


def test_what_is_no_http_gets_an_answer_and_leaves_the_server_up() -> None:
    async def run() -> None:
        async with serving(ControllerMetrics().registry) as server:
            assert (await raw(server, b"hello\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
            assert (await raw(server, b"x" * 40_000)).startswith(b"HTTP/1.1 400 ")
            assert (await raw(server, b"GET /metrics HTTP/1.0\r\n\r\n")).startswith(b"HTTP/1.1 200 ")

    asyncio.run(run())


def test_stopping_closes_connections_that_say_nothing() -> None:
    async def run() -> bytes:
        server = await serve_metrics(CollectorRegistry(), "127.0.0.1")
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.sleep(0)
        await server.stop()
        await server.stop()
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""
        finally:
            writer.close()

    assert asyncio.run(asyncio.wait_for(run(), 4.0)) == b""


def test_a_port_in_use_is_an_error() -> None:
    async def run() -> None:
        async with serving(CollectorRegistry()) as server:
            with pytest.raises(ClusterError, match=str(server.port)):
                await serve_metrics(CollectorRegistry(), "127.0.0.1", port=server.port)

    asyncio.run(run())
