"""`tandem test-connection` against real routers whose workers are scripted: what passes, and each way to fail."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cluster.access import Access
from cluster.cli import app
from cluster.connection_check import check_cluster, check_http
from cluster.fabric import Way, ways_of
from router.app import RunningRouter
from router.dispatch import DispatchResult
from tandem.errors import ClusterError, ConfigError, TandemError
from tandem.rpc.tandem.v1 import common_pb2, inference_pb2
from tandem.types import Request, WorkerId
from tests.certificates import Authority
from tests.fake_dispatcher import FakeDispatch, FakeDispatcher, Script
from tests.router_harness import running, runs_async, saying

RDMA = "rc_mlx5, cma; large payloads fetched by the receiver; endpoint error handling on"
TCP = "tcp; large payloads pushed; endpoint error handling off"
BYTES = 4096


class _Moved(FakeDispatch):
    """A request whose KV was moved."""

    async def finish(self) -> DispatchResult:
        self.finished.set()
        return DispatchResult(
            prefill_worker=WorkerId("prefill-0"),
            decode_worker=WorkerId("decode-0"),
            prefill=common_pb2.PrefillTimings(transfer=common_pb2.TransferTimings(num_bytes=BYTES)),
            decode=common_pb2.DecodeTimings(num_iterations=self.num_steps),
        )


@dataclass
class MovingDispatcher(FakeDispatcher):
    """Its prefill worker has one link, on which each request moves some bytes."""

    detail: str = RDMA
    is_stuck: bool = False
    """The link's count stays where it is."""

    def dispatch(self, request: Request) -> FakeDispatch:
        dispatch = _Moved(request, self.script(request))
        self.dispatches.append(dispatch)
        return dispatch

    async def status(self) -> inference_pb2.ClusterStatus:
        num_bytes = BYTES * (1 if self.is_stuck else 1 + len(self.dispatches))
        link = inference_pb2.LinkStatus(
            peer_worker_id="decode-0", transport="ucx", detail=self.detail, num_bytes=num_bytes
        )
        return inference_pb2.ClusterStatus(
            workers=[inference_pb2.WorkerStatus(worker_id="prefill-0", role="prefill", state="ready", links=[link])]
        )


def moving(**changes: Any) -> MovingDispatcher:
    return MovingDispatcher(lambda request: Script(token_ids=[20], repeat=True), **changes)


async def checked(dispatcher: FakeDispatcher, required: Way | None = None) -> list[str]:
    """What is said of a router over this dispatcher."""
    said: list[str] = []
    async with running(dispatcher) as router:
        access = Access(endpoint=router.grpc_address)
        await check_cluster(access, required=required, timeout_s=0.1, say=said.append)
    return said


@pytest.mark.parametrize(
    ("detail", "ways"),
    [
        (RDMA, {Way.RDMA, Way.SHM}),
        (TCP, {Way.TCP}),
        ("cuda_ipc, cuda_copy; large payloads pushed", {Way.NVLINK}),
        ("ud_verbs", {Way.RDMA}),
        ("memfd", {Way.SHM}),
        ("posix, cma, tcp", {Way.SHM, Way.TCP}),
        ("something new", set()),
    ],
)
def test_what_a_transport_negotiated_is_told_by_its_name(detail: str, ways: set[Way]) -> None:
    assert ways_of(detail) == ways


@runs_async
async def test_a_cluster_that_serves_and_moves_its_kv_as_asked_passes() -> None:
    said = await checked(moving(), Way.RDMA)
    assert [line.partition(":")[0] for line in said] == ["health", "generation", "transfer"]
    assert said[-1] == f"transfer: {BYTES} bytes of KV from prefill-0 to decode-0 over ucx ({RDMA})"


@runs_async
async def test_a_fabric_that_fell_back_to_another_fails() -> None:
    with pytest.raises(ClusterError, match=r"over ucx \(tcp; .*: not over rdma, as it should"):
        await checked(moving(detail=TCP), Way.RDMA)
    assert await checked(moving(detail=TCP))


@pytest.mark.parametrize(
    "dispatcher", [moving(is_stuck=True), FakeDispatcher(lambda request: Script(token_ids=(20,), repeat=True))]
)
@runs_async
async def test_kv_that_did_not_move_fails(dispatcher: FakeDispatcher) -> None:
    with pytest.raises(ClusterError, match="no KV moved from prefill-0 to decode-0"):
        await checked(dispatcher)


@runs_async
async def test_a_router_that_is_not_ready_fails_after_the_wait() -> None:
    with pytest.raises(ClusterError, match="requests are not served yet: health is NOT_SERVING"):
        await checked(moving(is_ready=False))


@runs_async
async def test_a_generation_that_ends_early_fails() -> None:
    with pytest.raises(TandemError):
        await checked(saying("ok", error=ClusterError("the worker died")))


def http_answer(router: RunningRouter, **access: Any) -> list[str]:
    said: list[str] = []
    found = Access(endpoint=router.grpc_address, **access)
    asyncio.run(check_http(router.http_url, found, say=said.append))
    return said


@runs_async
async def test_http_is_asked_too_with_tls_and_a_key(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    files = authority.server_files()
    keys = tmp_path / "keys"
    await asyncio.to_thread(keys.write_text, "sk-1\n")
    fields = {"tls_cert_file": str(files.cert), "tls_key_file": str(files.key), "api_keys_file": str(keys)}
    async with running(saying("Hello"), **fields) as router:
        trusting: dict[str, Any] = {"tls_ca_file": authority.file}
        said = await asyncio.to_thread(http_answer, router, api_key="sk-1", **trusting)
        assert said == [f"HTTP: 5 characters from {router.http_url}"]
        with pytest.raises(ClusterError, match="answers 401: this API key is not known here"):
            await asyncio.to_thread(http_answer, router, api_key="sk-2", **trusting)
        with pytest.raises(ClusterError, match="CERTIFICATE_VERIFY_FAILED"):
            await asyncio.to_thread(http_answer, router, api_key="sk-1")


def test_what_is_no_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="--http must be a URL"):
        asyncio.run(check_http("127.0.0.1:8000", Access(endpoint="a:1"), say=lambda _: None))


@runs_async
async def test_the_command_says_what_it_found_and_fails_with_status_1() -> None:
    async with running(moving(detail=TCP)) as router:

        def invoke(*arguments: str) -> tuple[int, str, str]:
            common = ["test-connection", "--endpoint", router.grpc_address, "--http", router.http_url]
            result = CliRunner().invoke(app, [*common, *arguments])
            return result.exit_code, result.stdout, result.stderr

        status, out, _ = await asyncio.to_thread(invoke)
        assert (status, len(out.splitlines())) == (0, 4)
        status, _, err = await asyncio.to_thread(invoke, "--require-transport", "rdma")
        assert status == 1
        assert "not over rdma, as it should" in err
