"""Pools that change under constant load: no request fails, no block leaks, every answer is that of transformers.

With a small model, so that the time goes into what is tested; `benchmarks/scaling.py` does the same with real weights.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.load import Load, constant_load
from tandem.model.files import resolve_model
from tandem.rpc.tandem.v1 import inference_pb2
from tests.e2e.live import (
    LiveCluster,
    cluster_status,
    generate,
    is_idle,
    live_cluster,
    run,
    stub_of,
    until,
    workers_of,
)
from tests.oracle import Oracle
from tests.tiny_model import save_tiny_llama

pytestmark = pytest.mark.slow

CHANGE_TIMEOUT_S = 150.0
PROMPT_LENGTHS = (1, 31, 33, 257, 700)
MAX_TOKENS = 48
CONFIG = {
    "pin_cores": False,  # every cluster that other tests start meanwhile would take the same ones
    "transfer": {"transport": "shm", "lease_s": 5.0},
    "prefill": {"num_blocks": 256},
    "decode": {"num_blocks": 256},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", num_kv_heads=2)


@pytest.fixture(scope="module")
def prompts() -> dict[str, list[int]]:
    return {f"length_{n}": [(7 * i * i + 3 * n) % 256 for i in range(n)] for n in PROMPT_LENGTHS}


@pytest.fixture(scope="module")
def golden(model: Path, prompts: dict[str, list[int]]) -> dict[str, tuple[int, ...]]:
    oracle = Oracle(resolve_model(str(model)))
    return {name: oracle.tokens(ids, MAX_TOKENS) for name, ids in prompts.items()}


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    config = {**CONFIG, "model": {"source": str(model)}}
    with live_cluster(tmp_path_factory.mktemp("scaling"), config) as cluster:
        yield cluster


async def tandem(cluster: LiveCluster, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Runs the command line while the load goes on."""
    command = [str(Path(sys.executable).parent / "tandem"), *arguments, "--endpoint", cluster.grpc]
    return await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=CHANGE_TIMEOUT_S, check=False)


def has(role: str, count: int) -> Callable[[inference_pb2.ClusterStatus], bool]:
    """Whether a pool has exactly these many workers, all ready."""

    def holds(status: inference_pb2.ClusterStatus) -> bool:
        states = [worker.state for worker in workers_of(status, role)]
        return states == ["ready"] * count

    return holds


async def one_each(cluster: LiveCluster) -> inference_pb2.ClusterStatus:
    """A worker in each pool, which is how tests begin: one that failed may have left other sizes."""

    def holds(status: inference_pb2.ClusterStatus) -> bool:
        return has("prefill", 1)(status) and has("decode", 1)(status)

    if not holds(await cluster_status(cluster)):
        result = await tandem(cluster, "scale", "prefill=1", "decode=1", "--wait")
        assert result.returncode == 0, result.stderr
    return await until(cluster, holds)


async def all_have_served(load: Load, role: str, names: set[str]) -> None:
    """Returns when each of these workers has had a request that was sent after this was called."""
    since_s, served = time.monotonic(), set[str]()
    try:
        async with asyncio.timeout(CHANGE_TIMEOUT_S):
            while served != names:
                await load.wait_for(1)
                served = {getattr(o, f"{role}_worker") for o in load.outcomes if o.start_s > since_s}
    except TimeoutError as exc:
        raise AssertionError(f"of {sorted(names)} only these have served: {sorted(served)}; {load.errors}") from exc


def pids(status: inference_pb2.ClusterStatus, role: str) -> dict[str, int]:
    return {worker.worker_id: worker.pid for worker in workers_of(status, role)}


def check(load: Load, golden: dict[str, tuple[int, ...]]) -> None:
    """Every request ended well, with the tokens of transformers."""
    assert load.errors == []
    assert {name: load.tokens_of(name) for name in load.prompts} == {name: {golden[name]} for name in load.prompts}


def controller_pid(cluster: LiveCluster) -> int:
    children = psutil.Process(cluster.process.pid).children()
    return next(child.pid for child in children if "cluster.run_controller" in child.cmdline())


@pytest.mark.parametrize("role", ["decode", "prefill"])
@pytest.mark.timeout(600)
def test_a_pool_grows_and_shrinks_under_load(
    cluster: LiveCluster, prompts: dict[str, list[int]], golden: dict[str, tuple[int, ...]], role: str
) -> None:
    other = "prefill" if role == "decode" else "decode"

    async def scenario() -> Load:
        untouched = pids(await one_each(cluster), other)
        async with constant_load(cluster.grpc, prompts, num_clients=4, max_tokens=MAX_TOKENS) as load:
            await load.wait_for(4)
            result = await tandem(cluster, "scale", f"{role}=3", "--wait", "--json")
            assert result.returncode == 0, result.stderr
            assert json.loads(result.stdout)["pools"][0]["num_ready"] == 3
            await all_have_served(load, role, {f"{role}-{index}" for index in range(3)})
            result = await tandem(cluster, "scale", f"{role}=1", "--wait")
            assert result.returncode == 0, result.stderr
            await load.wait_for(4)
        assert pids(await until(cluster, lambda s: has(role, 1)(s) and is_idle(s)), other) == untouched
        return load

    check(run(scenario()), golden)


@pytest.mark.timeout(600)
def test_a_restart_replaces_every_worker_and_fails_no_request(
    cluster: LiveCluster, prompts: dict[str, list[int]], golden: dict[str, tuple[int, ...]]
) -> None:
    async def scenario() -> Load:
        before = pids(await one_each(cluster), "decode")
        async with constant_load(cluster.grpc, prompts, num_clients=3, max_tokens=MAX_TOKENS) as load:
            result = await tandem(cluster, "restart", "decode", "--wait")
            assert result.returncode == 0, result.stderr
            await load.wait_for(4)
        status = await until(cluster, lambda s: has("decode", 1)(s) and is_idle(s))
        assert not set(pids(status, "decode").values()) & set(before.values())
        assert [worker.generation for worker in workers_of(status, "decode")] == [1]
        return load

    check(run(scenario()), golden)


@pytest.mark.timeout(600)
def test_a_controller_that_dies_in_the_middle_of_a_change_comes_back_and_finishes_it(
    cluster: LiveCluster, prompts: dict[str, list[int]], golden: dict[str, tuple[int, ...]]
) -> None:
    async def scenario() -> Load:
        await one_each(cluster)
        async with constant_load(cluster.grpc, prompts, num_clients=3, max_tokens=MAX_TOKENS) as load:
            assert (await tandem(cluster, "scale", "decode=2")).returncode == 0
            os.kill(controller_pid(cluster), signal.SIGKILL)
            await until(cluster, has("decode", 2), timeout_s=CHANGE_TIMEOUT_S)
            assert (await tandem(cluster, "scale", "decode=1")).returncode == 0
            os.kill(controller_pid(cluster), signal.SIGKILL)
            await until(cluster, has("decode", 1), timeout_s=CHANGE_TIMEOUT_S)
            await load.wait_for(4)
        await until(cluster, is_idle)
        return load

    check(run(scenario()), golden)


@pytest.mark.timeout(600)
def test_a_worker_that_is_drained_or_killed_is_replaced_and_a_drain_of_the_only_one_fails_no_request(
    cluster: LiveCluster, prompts: dict[str, list[int]], golden: dict[str, tuple[int, ...]]
) -> None:
    async def scenario() -> Load:
        before = await one_each(cluster)
        (drained,) = workers_of(before, "prefill")
        async with constant_load(cluster.grpc, prompts, num_clients=2, max_tokens=MAX_TOKENS) as load:
            result = await tandem(cluster, "drain", drained.worker_id, "--wait")
            assert result.returncode == 0, result.stderr
            await load.wait_for(2)
        (fresh,) = workers_of(await until(cluster, has("prefill", 1)), "prefill")
        assert fresh.pid != drained.pid

        os.kill(fresh.pid, signal.SIGKILL)

        def is_replaced(status: inference_pb2.ClusterStatus) -> bool:
            return has("prefill", 1)(status) and workers_of(status, "prefill")[0].pid != fresh.pid

        await until(cluster, is_replaced, timeout_s=CHANGE_TIMEOUT_S)
        return load

    check(run(scenario()), golden)


def state_of(status: inference_pb2.ClusterStatus, victim: inference_pb2.WorkerStatus) -> str:
    """"dying" while the killed process is still shown, maybe beside its successor; then "lost", or "replaced"."""
    shown = workers_of(status, victim.role)
    assert shown
    if any(worker.epoch == victim.epoch for worker in shown):
        return "dying"
    return "lost" if all(worker.state == "lost" for worker in shown) else "replaced"


async def told(cluster: LiveCluster, text: str) -> None:
    """Returns when `tandem up` has said so: the controller may look at the registry after the router does."""
    await until(cluster, lambda _: text in cluster.log.read_text())


@pytest.mark.timeout(400)
def test_when_the_only_worker_of_a_pool_dies_it_is_told_and_shown_and_requests_wait_for_its_successor(
    cluster: LiveCluster, prompts: dict[str, list[int]], golden: dict[str, tuple[int, ...]]
) -> None:
    async def scenario() -> None:
        before = await one_each(cluster)
        [victim] = workers_of(before, "decode")
        os.kill(victim.pid, signal.SIGKILL)
        async with stub_of(cluster) as stub:
            asked = [generate(stub, prompts["length_33"], max_tokens=MAX_TOKENS) for _ in range(2)]
            answers = asyncio.gather(*asked)
            shown = await until(cluster, lambda status: state_of(status, victim) != "dying")
            assert shown.model == before.model
            if state_of(shown, victim) == "lost":  # else its successor was there before its registration had run out
                assert [link for worker in workers_of(shown, "prefill") for link in worker.links] == []
            assert {tuple(answer.tokens) for answer in await answers} == {golden["length_33"]}

            await until(cluster, has("decode", 1))
            await told(cluster, f"worker {victim.worker_id} died (process {victim.pid})")

    run(scenario())
