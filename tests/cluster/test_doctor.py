"""The doctor: every check for real on this host, with broken inputs, and with checks that misbehave."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from cluster.checks.finding import Finding, Settings, State
from cluster.checks.table import CHECKS, CheckSpec, choose
from cluster.cli import app
from cluster.display import CheckProgress
from cluster.doctor import as_data, print_findings, run_checks
from cluster.embedded_redis import EmbeddedRedis
from tandem.config import ClusterConfig, from_mapping

BAD = "tests.cluster.bad_checks"


def settings_of(**sections: Any) -> Settings:
    """A configuration with these sections."""
    return Settings(config=from_mapping(sections))


def run_one(name: str, settings: Settings | None = None) -> list[Finding]:
    """One of the doctor's checks, as the doctor runs it."""
    specs = [spec for spec in CHECKS if spec.name == name]
    return run_checks(settings or Settings(config=ClusterConfig()), specs)


def bad(function: str, *, deadline_s: float = 60.0) -> CheckSpec:
    return CheckSpec(name=function, place=f"{BAD}:{function}", deadline_s=deadline_s)


def run_bad(*specs: CheckSpec) -> list[Finding]:
    return run_checks(Settings(config=ClusterConfig()), specs)


# --- the whole thing


@pytest.mark.slow
def test_every_check_answers_on_this_host_and_the_exit_status_says_whether_there_is_a_problem(tmp_path: Path) -> None:
    config = tmp_path / "cluster.yaml"
    config.write_text(yaml.safe_dump({"router": {"grpc_port": 0, "http_port": 0}}))
    command = [sys.executable, "-m", "cluster.cli", "doctor", "--json", "--config", str(config)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    answer = json.loads(result.stdout)
    states = {finding["check"]: finding["state"] for finding in answer["findings"]}
    assert set(states) == {*(spec.name for spec in CHECKS), "memory"}
    assert result.returncode == int("problem" in states.values())
    assert states["transport-ucx"] == states["transport-shm"] == states["redis"] == states["model"] == "ok"
    assert "GB/s" in next(f["found"] for f in answer["findings"] if f["check"] == "transport-ucx")
    for finding in answer["findings"]:
        assert "crashed" not in finding["found"], finding
        assert finding["advice"] or finding["state"] in ("ok", "skipped"), finding


def test_a_problem_is_exit_status_1_and_says_what_to_do(tmp_path: Path) -> None:
    config = tmp_path / "cluster.yaml"
    config.write_text(yaml.safe_dump({"registry": {"redis_url": "redis://127.0.0.1:1/0"}}))
    result = CliRunner().invoke(app, ["doctor", "--config", str(config), "--only", "redis"])
    assert result.exit_code == 1
    assert "no usable Redis at redis://127.0.0.1:1/0" in result.stdout
    assert "→ start it" in result.stdout


def test_an_unknown_check_is_wrong_usage() -> None:
    result = CliRunner().invoke(app, ["doctor", "--only", "weather"])
    assert result.exit_code == 2
    assert "no check 'weather'; there are clock, cores" in result.stderr


# --- checks that misbehave


def test_a_check_that_hangs_is_ended_with_all_its_children_and_the_others_are_run() -> None:
    began_s = time.monotonic()
    hung, fine = run_bad(bad("hang", deadline_s=5.0), bad("fine"))
    assert hung.state is State.PROBLEM
    assert "still waiting after 5 s" in hung.found
    assert (fine.state, fine.found) == (State.OK, "all is well")
    assert time.monotonic() - began_s < 60


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("fail", "crashed (status 1): RuntimeError: something unforeseen"),
        ("die", "crashed (signal 11)"),
        ("answer_half", "crashed (status 3)"),
        ("absent", "has no attribute 'absent'"),
    ],
)
def test_a_check_that_crashes_is_reported_as_that(function: str, words: str) -> None:
    (finding,) = run_bad(bad(function))
    assert finding.state is State.PROBLEM
    assert words in finding.found


def test_findings_are_shown_with_their_advice_and_counted() -> None:
    findings = [
        Finding(check="a", state=State.OK, found="fine"),
        Finding(check="b", state=State.WARNING, found="[odd]", advice="look"),
    ]
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    print_findings(findings, console)
    console.file.close()
    text = console.export_text()
    assert "[odd]" in text
    assert "→ look" in text
    assert text.rstrip().endswith("2 findings of 2 checks: 1 ok, 1 warning")
    assert as_data(findings)["problem"] is False


def test_a_check_may_find_several_things_and_counts_once_as_a_check() -> None:
    findings = [Finding(check="model", state=State.OK, found=found) for found in ("it is here", "it fits")]
    console = Console(width=80, record=True, file=StringIO())
    print_findings(findings, console)
    assert console.export_text().rstrip().endswith("2 findings of 1 check: 2 ok")


def test_progress_says_how_many_checks_are_done_and_which_run() -> None:
    page = StringIO()
    heard: list[str] = []
    with CheckProgress(Console(file=page, force_terminal=True, width=80), total=3) as progress:
        for told in (progress.started, progress.done):
            told("model")
            heard.append(str(progress))
        progress.started("ray")
        progress.started("redis")
        heard.append(str(progress))
        progress.done("ray")
        heard.append(str(progress))
    assert heard == [
        "0 of 3 checks done, now model",
        "1 of 3 checks done",
        "1 of 3 checks done, now ray and redis",
        "2 of 3 checks done, now redis",
    ]
    assert "2 of 3 checks done, now redis" in page.getvalue()


def test_every_check_is_announced_before_it_is_over() -> None:
    told: list[tuple[str, str]] = []
    settings = Settings(config=ClusterConfig())
    run_checks(
        settings,
        choose(["clock", "cores"]),
        on_start=lambda name: told.append(("started", name)),
        on_done=lambda name: told.append(("done", name)),
    )
    assert sorted(told) == [(word, name) for word in ("done", "started") for name in ("clock", "cores")]
    assert all(told.index(("started", name)) < told.index(("done", name)) for name in ("clock", "cores"))


# --- broken inputs


def test_a_model_that_is_not_there_is_a_problem() -> None:
    (finding,) = run_one("model", settings_of(model={"source": "/nowhere/model.gguf"}))
    assert finding.state is State.PROBLEM
    assert "/nowhere/model.gguf" in finding.found
    assert finding.advice


def test_pools_that_do_not_fit_into_memory_are_a_problem() -> None:
    model, memory = run_one("model", settings_of(decode={"num_blocks": 100_000_000}))
    assert model.state is State.OK
    assert memory.state is State.PROBLEM
    assert "decode.num_blocks" in memory.advice


def test_shared_memory_that_is_too_small_for_the_workers_is_a_problem() -> None:
    workers = {"num_workers": 1024}
    config = from_mapping({"prefill": workers, "decode": workers})
    (finding,) = run_one("shared-memory", Settings(config=config, shm_dir=small_file_system()))
    assert finding.state is State.PROBLEM
    assert "--shm-size" in finding.advice


def small_file_system() -> str:
    """Some mounted file system that is smaller than 2048 workers need."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        place = line.split()[1]
        try:
            room = os.statvfs(place)
        except OSError:
            continue
        if room.f_blocks * room.f_frsize < 2 << 30:
            return place
    pytest.skip("no small file system is mounted here")


def test_a_directory_that_is_not_there_is_a_problem() -> None:
    (finding,) = run_one("shared-memory", Settings(config=ClusterConfig(), shm_dir="/nowhere"))
    assert (finding.state, finding.found) == (State.PROBLEM, "/nowhere: No such file or directory")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://127.0.0.1:1/0", "no usable Redis at redis://127.0.0.1:1/0"),
        ("redis://:secret@127.0.0.1:1/0", "no usable Redis at redis://127.0.0.1:1/0"),
        ("http://127.0.0.1:1", "is not a Redis URL"),
    ],
)
def test_a_redis_that_cannot_be_used_is_a_problem_that_hides_the_password(url: str, words: str) -> None:
    (finding,) = run_one("redis", settings_of(registry={"redis_url": url}))
    assert finding.state is State.PROBLEM
    assert words in finding.found
    assert "secret" not in finding.found


def test_a_redis_that_accepts_and_says_nothing_does_not_hold_the_doctor_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        (finding,) = run_one("redis", settings_of(registry={"redis_url": f"redis://127.0.0.1:{port}/0"}))
    assert finding.state is State.PROBLEM


def test_an_external_redis_is_named_with_its_version_latency_and_persistence() -> None:
    server = EmbeddedRedis()
    asyncio.run(server.start())
    try:
        settings = settings_of(registry={"redis_url": server.url})
        (redis,) = run_one("redis", settings)
        (clock,) = run_one("clock", settings)
    finally:
        server.stop()
    assert redis.state is State.OK
    assert redis.found.startswith("Valkey ")
    assert "ping" in redis.found
    assert "persistence" in redis.found
    assert clock.state is State.OK
    assert "ms from Redis" in clock.found


def test_a_port_that_is_taken_is_a_warning() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (finding,) = run_one("ports", settings_of(router={"grpc_port": port, "http_port": 0}))
    assert finding.state is State.WARNING
    assert f"gRPC port {port}" in finding.found


def test_a_transport_that_cannot_start_is_a_problem_only_when_it_is_the_configured_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_TLS", "pigeon")
    (configured,) = run_one("transport-ucx", settings_of(transfer={"transport": "ucx"}))
    assert configured.state is State.PROBLEM
    assert "--transport shm" in configured.advice


def test_ucx_over_tcp_alone_is_a_warning_with_what_was_negotiated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    (finding,) = run_one("transport-ucx")
    assert finding.state is State.WARNING
    assert "negotiated: tcp" in finding.found


# --- kernels


def test_kernels_are_named_with_the_processor_they_are_for() -> None:
    (finding,) = run_one("kernels")
    assert finding.state is State.OK
    assert any(isa in finding.found for isa in ("avx2", "avx512", "base"))


def test_kernels_that_there_are_not_are_a_problem_that_names_those_that_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TANDEM_KERNELS", "avx512")
    (finding,) = run_one("kernels")
    assert finding.state is State.PROBLEM
    assert finding.found == "TANDEM_KERNELS must be torch, base, avx2 or not set, got 'avx512'"


def test_kernels_that_are_switched_off_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_KERNELS", "torch")
    (finding,) = run_one("kernels")
    assert finding.state is State.WARNING
    assert finding.advice == "unset TANDEM_KERNELS"
