"""The command line: help, usage errors, and what it looks like without a terminal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli import app

COMMANDS = ("up", "generate", "chat", "status", "doctor", "demo")
NOBODY = "127.0.0.1:1"


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.stdout, result.stderr


def run_tandem(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cluster.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL, check=False)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str) -> None:
    status, out, _ = invoke(command, "--help")
    assert status == 0
    assert f"Example: tandem {command}" in out


@pytest.mark.parametrize("command", ["up", "demo"])
def test_the_help_names_every_transport(command: str) -> None:
    _, out, _ = invoke(command, "--help")
    assert "ucx, shm, collective, auto" in " ".join(out.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate"], "Missing argument"),
        (["generate", "x", "--temperature", "3"], "temperature"),
        (["generate", "x", "--max-tokens", "0"], "max-tokens"),
        (["nothing"], "No such command"),
        (["up", "--prefill", "0"], "prefill.num_workers must be 1 to 1024, got 0"),
        (["up", "--transport", "pigeon"], "transfer.transport must be one of ucx, shm"),
        (["up", "--config", "/nonexistent.yaml"], "/nonexistent.yaml cannot be read"),
    ],
)
def test_wrong_usage_is_explained_and_exits_with_2(arguments: list[str], message: str) -> None:
    status, _, err = invoke(*arguments)
    assert status == 2
    assert message in err


@pytest.mark.parametrize("arguments", [["generate", "x"], ["status"]])
def test_an_absent_router_is_one_line_that_says_what_to_do(arguments: list[str]) -> None:
    status, out, err = invoke(*arguments, "--endpoint", NOBODY)
    assert (status, out) == (1, "")
    assert err.splitlines() == [
        f"tandem: no router answers at {NOBODY}; start one with `tandem up` or give --endpoint HOST:PORT"
    ]


def test_without_a_terminal_there_are_no_escape_codes() -> None:
    result = run_tandem("status", "--endpoint", NOBODY)
    assert result.returncode == 1
    assert "\x1b" not in result.stdout + result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("module", ["cluster.cli", "cluster.generate", "cluster.chat", "cluster.status_view"])
def test_the_client_commands_load_neither_ray_nor_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit(bool({{'ray', 'torch', 'transformers'}} & set(sys.modules)))"
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False, timeout=60).returncode == 0
