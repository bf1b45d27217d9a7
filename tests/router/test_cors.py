"""Pages of origins that the configuration names may call the API, with API keys too; no others, and none by default."""

from __future__ import annotations

from pathlib import Path

import httpx

from tests.router_harness import running, runs_async, saying
from tests.router_http import TEXT, client

ALLOWED = "access-control-allow-origin"


async def asked_for_leave(http: httpx.AsyncClient, origin: str) -> httpx.Response:
    headers = {"origin": origin, "access-control-request-method": "POST"}
    return await http.options("/v1/completions", headers={**headers, "access-control-request-headers": "authorization"})


def test_pages_of_named_origins_may_call_and_no_others(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")

    @runs_async
    async def run() -> None:
        origins = "https://a.example, https://b.example"
        router_of_ours = running(saying("ok"), cors_origins=origins, api_keys_file=str(keys))
        async with router_of_ours as router, client(router) as http:
            leave = await asked_for_leave(http, "https://b.example")
            assert (leave.status_code, leave.headers[ALLOWED]) == (200, "https://b.example")
            assert ALLOWED not in (await asked_for_leave(http, "https://c.example")).headers
            headers = {"origin": "https://a.example", "authorization": "Bearer secret"}
            answer = await http.post("/v1/completions", json=TEXT, headers=headers)
            assert (answer.status_code, answer.headers[ALLOWED]) == (200, "https://a.example")

    run()


@runs_async
async def test_no_page_may_call_by_default() -> None:
    async with running(saying("ok")) as router, client(router) as http:
        assert ALLOWED not in (await asked_for_leave(http, "https://a.example")).headers
