"""The options of commands that ask a router: the same everywhere, and what they lead to."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.access import Access
from cluster.cli import app
from tandem.errors import ConfigError
from tests.certificates import Authority
from tests.router_harness import running, runs_async, saying

COMMANDS = ("generate", "chat", "status", "scale", "drain", "restart", "test-connection")
OPTIONS = (
    "--endpoint",
    "--tls-ca-file",
    "--tls-cert-file",
    "--tls-key-file",
    "--tls-server-name",
    "--api-key",
    "--api-key-file",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_client_command_has_all_options_of_access(command: str) -> None:
    out = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).stdout
    assert [option for option in OPTIONS if option not in out] == []
    assert "TANDEM_API_KEY" in out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--endpoint", "http://a:1"], "got the URL 'http://a:1'"),
        (["--tls-cert-file", "a.pem"], "--tls-cert-file and --tls-key-file are given together"),
        (["--tls-ca-file", "/nonexistent.pem"], "/nonexistent.pem cannot be read"),
        (["--api-key", "sk-\u00e9"], "an API key has only printable ASCII characters"),
        (["--api-key-file", "/nonexistent"], "/nonexistent cannot be read"),
    ],
)
def test_wrong_options_are_one_line_and_status_2(arguments: list[str], complaint: str) -> None:
    result = CliRunner().invoke(app, ["status", *arguments])
    assert result.exit_code == 2
    assert complaint in result.stderr
    assert len(result.stderr.splitlines()) == 1


@runs_async
async def test_a_command_reaches_a_router_that_asks_for_everything(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server_cert, server_key = authority.issue("server", identity="router.example")
    cert, key = authority.issue("client")
    keys = tmp_path / "keys"
    await asyncio.to_thread(keys.write_text, "sk-1\n")
    fields = {
        "tls_cert_file": str(server_cert),
        "tls_key_file": str(server_key),
        "tls_client_ca_file": str(authority.file),
        "api_keys_file": str(keys),
    }
    async with running(saying("Hello"), **fields) as router:
        arguments = ["generate", "Hi", "--endpoint", router.grpc_address, "--tls-ca-file", str(authority.file)]
        arguments += ["--tls-cert-file", str(cert), "--tls-key-file", str(key), "--tls-server-name", "router.example"]

        def invoke(key: str) -> tuple[int, str, str]:
            result = CliRunner().invoke(app, arguments, env={"TANDEM_API_KEY": key})
            return result.exit_code, result.stdout, result.stderr

        assert await asyncio.to_thread(invoke, "sk-1") == (0, "Hello\n", "")
        status, _, err = await asyncio.to_thread(invoke, "sk-2")
        assert status == 1
        assert "this API key is not known here; give --api-key or $TANDEM_API_KEY" in err


def test_a_connection_in_the_clear_has_no_credentials() -> None:
    assert Access(endpoint="a:1").credentials() is None
    assert Access(endpoint="a:1", tls=True).credentials() is not None
    with pytest.raises(ConfigError, match="HOST:PORT of the gRPC port"):
        Access(endpoint="https://a:1")
