"""Endpoints that are nearly right: the hint says which port is wanted."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from cluster.cli import app
from cluster.client import Client
from tandem.errors import ClusterError, ConfigError
from tests.router_harness import running, runs_async, saying


@runs_async
async def test_the_http_port_is_recognised() -> None:
    async with running(saying("x")) as router, Client(router.http_address) as client:
        with pytest.raises(ClusterError, match=f"{router.http_address} answers HTTP, not gRPC: give the gRPC port"):
            await client.status()


def test_a_url_is_no_endpoint() -> None:
    with pytest.raises(ConfigError, match=r"HOST:PORT of the gRPC port.* got the URL 'http://127\.0\.0\.1:8000'"):
        Client("http://127.0.0.1:8000")


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (["generate", "x", "--seed", str(2**64)], str(2**64)),
        (["generate", "x", "--priority", "-101"], "-101"),
        (["generate", "x", "--max-tokens", str(2**31)], str(2**31)),
        (["generate", "x", "--temperature", "hot"], "hot"),
        (["scale", "decode=99999999999"], "99999999999"),
        (["status", "--endpoint", "https://a:1"], "https://a:1"),
    ],
)
def test_a_value_that_does_not_fit_is_echoed(arguments: list[str], value: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert f"got the URL {value!r}" in result.stderr or f"got {value}" in result.stderr.replace("'", "")
