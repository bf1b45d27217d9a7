"""`tandem router` as a process, with a real Valkey and the default model's tokenizer: health, readiness, the end."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from typer.testing import CliRunner

from cluster.cli import app
from cluster.embedded_redis import EmbeddedRedis
from tandem.key_source import KEY_VARIABLE
from tandem.rpc.client import open_channel
from tests.factories import CLUSTER_KEY
from tests.metadata import CLUSTER, registry_of, valkey, worker_record
from tests.router_harness import runs_within

INFERENCE = "tandem.v1.Inference"
WAIT_S = 150.0


@dataclass
class Started:
    """A router that listens, and what it said in its ready file."""

    process: asyncio.subprocess.Process
    ready_file: Path
    said: dict[str, str]

    async def health(self, service: str) -> str:
        """What its health port answers."""
        async with open_channel(self.said["health"]) as channel:
            request = health_pb2.HealthCheckRequest(service=service)
            answer = await health_pb2_grpc.HealthStub(channel).Check(request)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

    async def until_health(self, service: str, wanted: str) -> None:
        """Waits for this answer."""
        while await self.health(service) != wanted:  # noqa: ASYNC110  asked as a probe asks
            await asyncio.sleep(0.05)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(autouse=True)
def cluster_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, CLUSTER_KEY.to_hex())


@asynccontextmanager
async def started(directory: Path, server: EmbeddedRedis, *arguments: str) -> AsyncIterator[Started]:
    ready_file = directory / "ready.json"
    command = [sys.executable, "-m", "cluster.cli", "router", "--cluster", CLUSTER, "--redis-url", server.url]
    ports = ["--grpc-port", "0", "--http-port", "0", "--health-port", str(free_port())]
    process = await asyncio.create_subprocess_exec(
        *command, *ports, "--ready-file", str(ready_file), *arguments, stdout=subprocess.PIPE
    )
    try:
        give_up_s = time.monotonic() + WAIT_S
        while not ready_file.exists():
            assert process.returncode is None
            assert time.monotonic() < give_up_s
            await asyncio.sleep(0.05)
        yield Started(process=process, ready_file=ready_file, said=json.loads(ready_file.read_text()))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.slow
@runs_within(200)
async def test_it_lives_without_workers_is_ready_with_them_and_ends_with_status_0(tmp_path: Path) -> None:
    async with (
        valkey() as server,
        registry_of(server) as registry,
        started(tmp_path, server) as router,
    ):
        assert (await router.health(""), await router.health(INFERENCE)) == ("SERVING", "NOT_SERVING")
        for worker_id in ("prefill-0", "decode-0"):
            await registry.put(worker_record(worker_id))
        await router.until_health(INFERENCE, "SERVING")
        await registry.remove(worker_record("decode-0").worker_id)
        await router.until_health(INFERENCE, "NOT_SERVING")
        assert await router.health("") == "SERVING"
        router.process.send_signal(signal.SIGTERM)
        out, _ = await router.process.communicate()
        assert router.process.returncode == 0
        assert out.decode().splitlines() == [
            f"gRPC   {router.said['grpc']}",
            f"HTTP   {router.said['http']}",
            f"health {router.said['health']}",
            "requests are served",
        ]
        assert not router.ready_file.exists()
        with pytest.raises(grpc.aio.AioRpcError):
            await router.health("")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["router"], "a router needs the cluster's Redis: give --redis-url"),
        (["router", "--redis-url", "http://x"], "is not a Redis URL"),
        (
            ["router", "--redis-url", "redis://x", "--grpc-port", "7000", "--health-port", "7000"],
            "router.health_port must be another port than router.grpc_port, got 7000",
        ),
        (["controller", "--ray-address", "nowhere", "--redis-url", "redis://x"], "--ray-address must be HOST:PORT"),
        (["controller", "--ray-address", "a:1"], "a controller needs the cluster's Redis: give --redis-url"),
        (["drain-node", "--node-ip", "10.0.0.1"], "give --redis-url"),
    ],
)
def test_wrong_options_are_one_line_and_status_2(arguments: list[str], complaint: str) -> None:
    result = CliRunner().invoke(app, arguments, env={"TANDEM_REDIS_URL": ""})
    assert result.exit_code == 2
    assert complaint in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", ["router", "controller", "probe", "drain-node", "node-metrics", "test-connection"])
def test_every_command_has_help_with_an_example(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert f"Example: tandem {command}" in result.stdout
