"""`tandem up` with the real model, router and workers, as a user runs it: from another process, without a terminal."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.slow
TANDEM = (sys.executable, "-m", "cluster.cli")
LAST_READY_LINE = "or     "


def tandem(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [*TANDEM, *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120, check=False)


@contextmanager
def cluster_up(ready_file: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    command = [*TANDEM, "up", "--grpc-port", "0", "--http-port", "0", "--ready-file", str(ready_file), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert any(line.startswith(LAST_READY_LINE) for line in process.stdout)
            yield process, json.loads(ready_file.read_text())
        finally:
            process.terminate()
            process.wait(timeout=90)


def test_up_serves_reports_itself_and_ends_without_a_trace(tmp_path: Path) -> None:
    ready_file = tmp_path / "ready.json"
    with cluster_up(ready_file, "--transport", "shm") as (process, ready):
        assert {"grpc", "head", "http", "redis", "workers", "startup", "router_startup", "total_s"} < set(ready)
        assert ready["model"]["name"]
        endpoint = ("--endpoint", ready["grpc"])

        answer = tandem("generate", "The capital of France is", "--max-tokens", "4", "--temperature", "0", *endpoint)
        assert (answer.returncode, answer.stderr) == (0, "")
        assert answer.stdout.startswith(" Paris")

        seeded = [
            tandem("generate", "-", "--max-tokens", "6", "--seed", "5", "--json", *endpoint, stdin="Once upon")
            for _ in range(2)
        ]
        results = [json.loads(result.stdout) for result in seeded]
        assert results[0]["token_ids"] == results[1]["token_ids"]
        assert results[0]["usage"]["completion_tokens"] == len(results[0]["token_ids"])

        status = json.loads(tandem("status", "--json", *endpoint).stdout)
        assert {worker["worker_id"]: worker["state"] for worker in status["workers"]} == {
            "prefill-0": "ready",
            "decode-0": "ready",
        }
        assert all(worker["num_free_blocks"] == worker["num_blocks"] for worker in status["workers"])
        assert [link["transport"] for worker in status["workers"] for link in worker["links"]] == ["shm"]
        assert "prefill-0 → decode-0" in tandem("status", *endpoint).stdout

        chat = tandem("chat", "--temperature", "0", "--max-tokens", "8", *endpoint, stdin="Say hello.\nAnd again.\n")
        assert (chat.returncode, set(chat.stderr.splitlines())) == (0, {"(cut after 8 tokens: see --max-tokens)"})
        assert len(chat.stdout.splitlines()) >= 2

        below = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=90) == 0
        assert not psutil.wait_procs(below, timeout=5)[1]
    assert not ready_file.exists()


def test_a_model_that_does_not_exist_is_one_line_and_exit_status_1() -> None:
    result = tandem("up", "--model", "no-such-model", "--grpc-port", "0", "--http-port", "0")
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("tandem: ")
    assert "no-such-model" in last
    assert "Traceback" not in result.stderr
