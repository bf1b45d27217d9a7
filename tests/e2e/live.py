"""A whole cluster as users start it (`tandem up` in a process of its own), and a client that keeps what it saw."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc
import yaml

from tandem.rpc.client import open_channel
from tandem.rpc.tandem.v1 import common_pb2, inference_pb2, inference_pb2_grpc

T = TypeVar("T")

START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 60.0
SETTLE_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class LiveCluster:
    """A running cluster. `grpc` is host:port, `http` is http://host:port."""

    grpc: str
    http: str
    redis: str
    process: subprocess.Popen[bytes]
    log: Path

    def worker_pids(self) -> dict[str, int]:
        """Process id of every registered worker, by id."""
        status = run(cluster_status(self))
        return {worker.worker_id: worker.pid for worker in status.workers if worker.pid}


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine in an event loop of its own."""
    return asyncio.run(coroutine)


@contextmanager
def live_cluster(directory: Path, config: dict[str, Any], *arguments: str) -> Iterator[LiveCluster]:
    """Starts `tandem up` on free ports, waits until it is ready, and stops it with SIGTERM: it must exit with 0."""
    directory.mkdir(parents=True, exist_ok=True)
    config_file, ready_file, log = directory / "config.yaml", directory / "ready.json", directory / "up.log"
    config_file.write_text(yaml.safe_dump({"router": {"grpc_port": 0, "http_port": 0}, **config}))
    tandem = str(Path(sys.executable).parent / "tandem")
    command = [tandem, "up", "--config", str(config_file), "--ready-file", str(ready_file)]
    with log.open("wb") as output:
        process = subprocess.Popen([*command, *arguments], stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not ready_file.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the cluster did not start:\n{log.read_text()[-4000:]}")
            time.sleep(0.1)
        ready = json.loads(ready_file.read_text())
        yield LiveCluster(grpc=ready["grpc"], http=ready["http"], redis=ready["redis"], process=process, log=log)
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_TIMEOUT_S) == 0, log.read_text()[-4000:]
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()


@dataclass
class Answer:
    """What came back for one request."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: int = common_pb2.FINISH_REASON_UNSPECIFIED
    usage: inference_pb2.Usage | None = None
    timings: inference_pb2.RequestTimings | None = None


@asynccontextmanager
async def stub_of(cluster: LiveCluster) -> AsyncIterator[inference_pb2_grpc.InferenceAsyncStub]:
    """An inference client."""
    async with open_channel(cluster.grpc) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


def request_of(prompt: str | list[int], **fields: Any) -> inference_pb2.GenerateRequest:
    """A request; sampling fields by name, greedy by default."""
    outer = {name: fields.pop(name) for name in ("request_id", "timeout_s", "model") if name in fields}
    sampling = common_pb2.SamplingParams(**{"temperature": 0.0, **fields})
    if isinstance(prompt, str):
        return inference_pb2.GenerateRequest(text=prompt, sampling=sampling, **outer)
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=prompt), sampling=sampling, **outer
    )


async def generate(
    stub: inference_pb2_grpc.InferenceAsyncStub,
    prompt: str | list[int],
    *,
    on_token: Callable[[int], None] | None = None,
    **fields: Any,
) -> Answer:
    """Runs a request to its end. Raises AioRpcError."""
    answer = Answer()
    async for step in stub.Generate(request_of(prompt, **fields)):
        answer.tokens += step.token_ids
        answer.text += step.text
        if on_token is not None and step.token_ids:
            on_token(len(answer.tokens))
        if step.finish_reason:
            answer.finish_reason, answer.usage, answer.timings = step.finish_reason, step.usage, step.timings
    return answer


async def cluster_status(cluster: LiveCluster) -> inference_pb2.ClusterStatus:
    """What the router says of the cluster now."""
    return await cluster_status_at(cluster.grpc)


async def cluster_status_at(endpoint: str) -> inference_pb2.ClusterStatus:
    """The same, of the router at host:port."""
    async with open_channel(endpoint) as channel:
        return await inference_pb2_grpc.AdminStub(channel).GetClusterStatus(inference_pb2.GetClusterStatusRequest())


def workers_of(status: inference_pb2.ClusterStatus, role: str) -> list[inference_pb2.WorkerStatus]:
    """The workers of one pool."""
    return [worker for worker in status.workers if worker.role == role]


async def until(
    cluster: LiveCluster,
    condition: Callable[[inference_pb2.ClusterStatus], bool],
    *,
    timeout_s: float = SETTLE_TIMEOUT_S,
    pause_s: float = 0.1,
) -> inference_pb2.ClusterStatus:
    """Asks for the status until it fulfils the condition; not so often that it takes much from what is waited for."""
    deadline = time.monotonic() + timeout_s
    async with open_channel(cluster.grpc) as channel:
        stub = inference_pb2_grpc.AdminStub(channel)
        while True:
            status: inference_pb2.ClusterStatus = await stub.GetClusterStatus(inference_pb2.GetClusterStatusRequest())
            if condition(status):
                return status
            assert time.monotonic() < deadline, f"not fulfilled within {timeout_s} s; last status:\n{status}"
            await asyncio.sleep(pause_s)


def is_idle(status: inference_pb2.ClusterStatus) -> bool:
    """Whether every block of both pools is free and nothing runs, waits or moves."""
    return status.num_running_requests == 0 and all(
        worker.state == "ready"
        and not worker.is_late
        and worker.num_free_blocks == worker.num_blocks
        and not worker.num_running
        and not worker.num_waiting
        and not worker.num_handoffs
        for worker in status.workers
    )


def status_of(error: grpc.aio.AioRpcError) -> tuple[grpc.StatusCode, str, str]:
    """(gRPC status, typed code, field to blame)."""
    metadata = dict(error.trailing_metadata() or ())
    return error.code(), str(metadata.get("tandem-code", "")), str(metadata.get("tandem-param", ""))
