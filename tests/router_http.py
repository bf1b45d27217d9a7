"""Calls of a router's HTTP API in tests."""

from __future__ import annotations

import httpx

from tests.fake_dispatcher import FakeDispatcher
from tests.router_harness import running, saying

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"prompt": "a"}


def client(router) -> httpx.AsyncClient:
    """Without TLS, and so without reading the system's certificates, which takes longer than most tests."""
    return httpx.AsyncClient(base_url=f"http://{router.http_address}", trust_env=False, timeout=30, verify=False)


async def events(http: httpx.AsyncClient, path: str, body: dict) -> list[str]:
    async with http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        raw = (await response.aread()).decode()
    assert raw.endswith("\n\n")
    lines = raw[:-2].split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    return [line.removeprefix("data: ") for line in lines]


async def post(path: str, dispatcher: FakeDispatcher | None = None, **request: object) -> httpx.Response:
    async with running(dispatcher or saying("ok")) as router, client(router) as http:
        return await http.post(path, **request)  # type: ignore[arg-type]
