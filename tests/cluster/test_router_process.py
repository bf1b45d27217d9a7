"""A router below a launcher, as a real process over a real Valkey: what it still answers when it has drained."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from cluster.client import Client
from cluster.router_process import RouterProcess
from tandem.config import ClusterConfig, RouterConfig
from tandem.errors import ClusterError, WorkerUnavailable
from tandem.key_source import KEY_VARIABLE
from tandem.rpc.tandem.v1 import common_pb2
from tests.conftest import children
from tests.factories import CLUSTER_KEY
from tests.metadata import CLUSTER, registry_of, valkey, worker_record
from tests.router_harness import runs_within

pytestmark = pytest.mark.slow
CONFIG = ClusterConfig(cluster=CLUSTER, router=RouterConfig(grpc_port=0, http_port=0), drain_timeout_s=1.0)


@pytest.fixture(autouse=True)
def cluster_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, CLUSTER_KEY.to_hex())


@runs_within(200)
async def test_a_router_that_has_drained_tells_operators_what_is_left_until_it_is_stopped(tmp_path: Path) -> None:
    async with valkey() as server, registry_of(server) as registry:
        for worker_id in ("prefill-0", "decode-0"):
            await registry.put(worker_record(worker_id))
        router = RouterProcess(CONFIG, redis_url=server.url, log=tmp_path / "log")
        endpoints = await router.start()
        await router.serving()
        assert await router.drain(timeout_s=60)
        async with Client(endpoints.grpc) as client:
            status = await client.status()
            assert status.is_draining
            assert sorted(worker.worker_id for worker in status.workers) == ["decode-0", "prefill-0"]
            with pytest.raises(WorkerUnavailable, match="shutting down"):
                await anext(client.generate("a", common_pb2.SamplingParams()))
        assert await router.stop(timeout_s=60)
        async with Client(endpoints.grpc) as client:
            with pytest.raises(ClusterError, match="no router answers"):
                await client.status()
    assert not children()


@runs_within(200)
async def test_a_router_that_has_died_is_drained_and_stopped_at_once(tmp_path: Path) -> None:
    async with valkey() as server:
        router = RouterProcess(CONFIG, redis_url=server.url, log=tmp_path / "log")
        await router.start()
        process = psutil.Process(router.pid)
        process.kill()
        assert await router.drain(timeout_s=60)
        assert await router.stop(timeout_s=60)
    assert not children()
