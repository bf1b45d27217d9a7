"""A worker of two ranks as users start it: Ray actors in one placement group, gone and back together."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tandem.rpc.tandem.v1 import inference_pb2
from tests.e2e.live import LiveCluster, generate, is_idle, live_cluster, run, stub_of, until, workers_of
from tests.pair import make_prompt, monolithic
from tests.tiny_model import save_tiny_llama

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROMPT = make_prompt(300)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("mha"), num_kv_heads=4, seed=1)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[LiveCluster]:
    config = {
        "model": {"source": str(model), "block_size": 8},
        "prefill": {"tensor_parallel": 2, "num_blocks": 128, "num_threads": 1, "max_batch_tokens": 64},
        "decode": {"num_blocks": 128, "num_threads": 1},
        "transfer": {"transport": "shm"},
        "prefix_store": {"host_bytes": 0},
    }
    with live_cluster(tmp_path_factory.mktemp("ranks"), config) as cluster:
        yield cluster


def other_ranks() -> list[psutil.Process]:
    """Processes of ranks other than 0."""
    return [p for p in psutil.Process().children(recursive=True) if "RayRank" in "".join(p.cmdline())]


async def answer(cluster: LiveCluster) -> list[int]:
    async with stub_of(cluster) as stub:
        return (await generate(stub, PROMPT, max_tokens=12, ignore_eos=True)).tokens


def test_two_ranks_give_the_tokens_of_one_engine_and_both_send(cluster: LiveCluster, model: Path) -> None:
    assert run(answer(cluster)) == monolithic(model, PROMPT, max_tokens=12)
    assert len(other_ranks()) == 1
    run(until(cluster, is_idle))


@pytest.mark.parametrize("killed", ["another rank", "rank 0"])
def test_a_worker_of_which_a_process_is_killed_ends_whole_and_comes_back_whole(
    cluster: LiveCluster, model: Path, killed: str
) -> None:
    [rank] = other_ranks()
    rank_0 = psutil.Process(workers_of(run(until(cluster, is_idle)), "prefill")[0].pid)
    os.kill(rank.pid if killed == "another rank" else rank_0.pid, signal.SIGKILL)

    def is_back(status: inference_pb2.ClusterStatus) -> bool:
        return is_idle(status) and [w.pid != rank_0.pid for w in workers_of(status, "prefill")] == [True]

    run(until(cluster, is_back))
    assert run(answer(cluster)) == monolithic(model, PROMPT, max_tokens=12)
    assert not rank.is_running()
    assert not rank_0.is_running()
    assert len(other_ranks()) == 1
