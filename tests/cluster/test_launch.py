"""The launcher with a real Redis and a real Ray, and workers and a router without a model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from redis import Redis

from cluster.events import Phase
from cluster.launch import ClusterLauncher, Parts
from cluster.router_process import RouterProcess
from cluster.serve import serve
from tandem.config import ClusterConfig, ModelConfig, RegistryConfig, RouterConfig
from tandem.errors import ClusterError
from tandem.pool_state import PoolState
from tandem.types import Role
from tests.conftest import children

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
TINY_ROUTER = (sys.executable, str(HERE / "tiny_router.py"))


def tiny_parts(worker: str = "TinyWorker") -> Parts:
    return Parts(
        worker_classes=dict.fromkeys(Role, f"tests.cluster.tiny_worker:{worker}"), router_command=TINY_ROUTER
    )


def make_config(cluster: str = "tiny", source: str = "none") -> ClusterConfig:
    return ClusterConfig(
        cluster=cluster,
        model=ModelConfig(source=source),
        router=RouterConfig(grpc_port=0, http_port=0),
        drain_timeout_s=2.0,
    )


class Recorder:
    """Keeps what it is told and lets a test wait for a note."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.changed = asyncio.Event()

    def begin(self, name: str) -> None:
        pass

    def done(self, phase: Phase) -> None:
        pass

    def note(self, text: str) -> None:
        self.notes.append(text)
        self.changed.set()

    async def until(self, wanted: Callable[[str], bool]) -> None:
        async with asyncio.timeout(60):
            while not any(map(wanted, self.notes)):
                self.changed.clear()
                await self.changed.wait()


async def resized(redis_url: str, recorder: Recorder) -> None:
    """The controller that came back does what it is asked."""
    state = PoolState(redis_url, cluster="tiny")
    try:
        await state.set_size(Role.DECODE, 2)
        await recorder.until(lambda note: "worker decode-1 is ready" in note)
        await state.set_size(Role.DECODE, 1)
        await recorder.until(lambda note: note == "worker decode-1 is gone")
    finally:
        await state.close()


def test_a_cluster_starts_restarts_what_dies_and_leaves_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        recorder = Recorder()
        launcher = ClusterLauncher(make_config(), progress=recorder, parts=tiny_parts())
        left = Path(tempfile.gettempdir()) / f"tandem-ray-{2**22 + 1}-{os.getpid()}"  # of a process that cannot be
        left.mkdir()
        async with launcher as info:
            assert not left.exists()
            assert f"removed {left}: the cluster that made it was killed" in recorder.notes
            assert sorted(worker.worker_id for worker in info.workers) == ["decode-0", "prefill-0"]
            assert {phase.name for phase in info.startup} >= {"Redis", "Ray"}
            assert json.loads(info.to_json())["grpc"] == info.grpc
            Redis.from_url(info.redis).close()

            os.kill(next(w.pid for w in info.workers if w.role == "decode"), signal.SIGKILL)
            await recorder.until(lambda note: "decode-0" in note and (" is back" in note or " is ready (" in note))
            controller = next(p for p in children() if "cluster.run_controller" in p.cmdline())
            controller.kill()
            await recorder.until(lambda note: note == "the controller is back")
            await resized(info.redis, recorder)
            router = next(p for p in children() if any("tiny_router" in word for word in p.cmdline()))
            router.kill()
            await recorder.until(lambda note: note == "the router is back")
            valkey = next(p for p in children() if "valkey" in p.name())
            valkey.kill()
            await recorder.until(lambda note: "Redis died" in note)
        assert not any("prefill-0" in note for note in recorder.notes if "at 127.0.0.1" not in note)
        assert not children()

    asyncio.run(scenario())


def test_a_router_that_cannot_start_takes_everything_down_with_its_own_words() -> None:
    async def scenario() -> None:
        launcher = ClusterLauncher(make_config(cluster="broken-router"), parts=tiny_parts())
        with pytest.raises(ClusterError, match="the router's ports are taken"):
            await launcher.start()
        assert not children()

    asyncio.run(scenario())


def test_a_worker_that_cannot_load_its_model_is_named_with_its_reason() -> None:
    async def scenario() -> None:
        launcher = ClusterLauncher(make_config(source="bad"), parts=tiny_parts())
        with pytest.raises(Exception, match=r"worker \w+-0 could not be started: no such model"):
            await launcher.start()
        assert not children()

    asyncio.run(scenario())


def test_an_external_redis_that_does_not_answer_is_named() -> None:
    config = replace(make_config(), registry=RegistryConfig(redis_url="redis://127.0.0.1:1/0"))
    with pytest.raises(ClusterError, match=r"no Redis answers at redis://127\.0\.0\.1:1/0"):
        asyncio.run(ClusterLauncher(config, parts=tiny_parts()).start())


def test_a_router_that_cuts_requests_after_the_drain_may_end_by_itself() -> None:
    async def scenario() -> None:
        config = replace(make_config(cluster="slow-router"), drain_timeout_s=0.5)
        launcher = ClusterLauncher(config, parts=tiny_parts())
        launcher._router = RouterProcess(config, redis_url="redis://none", log=None, command=TINY_ROUTER)
        await launcher._router.start()
        await launcher.stop()
        assert not children()

    asyncio.run(scenario())


def test_serving_ends_on_a_signal_and_takes_the_ready_file_away(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    seen: list[dict[str, object]] = []

    async def on_ready(_: object) -> None:
        seen.append(json.loads(ready.read_text()))
        os.kill(os.getpid(), signal.SIGTERM)

    launcher = ClusterLauncher(make_config(), parts=tiny_parts())
    asyncio.run(serve(launcher, ready_file=ready, on_ready=on_ready, on_stop=lambda _: None))
    assert seen[0]["redis"]
    assert not ready.exists()
    assert not children()
