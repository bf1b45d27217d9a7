"""What a node's probes see: its raylet in the process table, and its workers in a real Valkey."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from cluster.cli import app
from cluster.embedded_redis import EmbeddedRedis
from cluster.probe import Question, ask
from cluster.raylet import find_raylet, raylets
from tandem.config import ClusterConfig, RegistryConfig
from tandem.errors import ClusterError
from tandem.registry import WorkerRecord
from tests.cluster.raylets import NODE_IP, running_raylet
from tests.metadata import CLUSTER, registry_of, worker_record


@pytest.fixture(scope="module")
def redis() -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis()
    asyncio.run(server.start())
    yield server
    server.stop()


@pytest.fixture(scope="module")
def raylet() -> Iterator[int]:
    with running_raylet() as process:
        yield process.pid


def at(worker_id: str, node_ip: str = NODE_IP, **changes: object) -> WorkerRecord:
    return worker_record(worker_id, address=f"{node_ip}:7000", **changes)


def answer(question: Question, redis: EmbeddedRedis | None = None, *records: WorkerRecord) -> str:
    """The probe's words when these are the cluster's workers."""
    url = "redis://127.0.0.1:1/0" if redis is None else redis.url
    config = ClusterConfig(cluster=CLUSTER, registry=RegistryConfig(redis_url=url))

    async def scenario() -> str:
        if redis is None:
            return await ask(question, config, node_ip=NODE_IP)
        async with registry_of(redis) as registry:
            for record in records:
                await registry.put(record)
            try:
                return await ask(question, config, node_ip=NODE_IP)
            finally:
                for record in records:
                    await registry.remove(record.worker_id)

    return asyncio.run(scenario())


def test_a_raylet_is_found_by_its_address_with_what_its_command_line_says(raylet: int) -> None:
    found = find_raylet(NODE_IP)
    assert found is not None
    assert (found.pid, found.node_id, found.gcs_address) == (raylet, "ab12", "127.0.0.1:1")
    assert found in list(raylets())
    assert find_raylet("127.0.0.78") is None


def test_a_node_is_live_while_its_raylet_answers_whatever_becomes_of_redis(raylet: int) -> None:
    assert answer(Question.LIVE) == f"the Ray node at {NODE_IP} answers"


def test_a_raylet_that_stands_still_is_not_live(raylet: int) -> None:
    found = find_raylet(NODE_IP)
    assert found is not None
    os.kill(raylet, signal.SIGSTOP)
    try:
        assert not found.answers(timeout_s=0.3)
    finally:
        os.kill(raylet, signal.SIGCONT)
    assert found.answers(timeout_s=10.0)


def test_a_node_without_a_raylet_is_neither_live_nor_ready(redis: EmbeddedRedis) -> None:
    config = ClusterConfig(registry=RegistryConfig(redis_url=redis.url))
    for question in (Question.LIVE, Question.READY):
        with pytest.raises(ClusterError, match=r"no Ray node runs here at 127\.0\.0\.78"):
            asyncio.run(ask(question, config, node_ip="127.0.0.78"))


def test_a_node_is_ready_with_ready_workers_or_none_and_admitted_only_with_some(
    raylet: int, redis: EmbeddedRedis
) -> None:
    elsewhere = at("decode-7", "127.0.0.78", state="draining")
    assert answer(Question.READY, redis, elsewhere) == "ready, without workers"
    with pytest.raises(ClusterError, match=f"no worker has registered at {NODE_IP}"):
        answer(Question.ROUTER_ADMITTED, redis, elsewhere)
    workers = [at("decode-0"), at("prefill-0"), elsewhere]
    for question in (Question.READY, Question.ROUTER_ADMITTED):
        assert answer(question, redis, *workers) == "ready: decode-0, prefill-0"


def test_a_worker_that_drains_makes_its_node_unready(raylet: int, redis: EmbeddedRedis) -> None:
    workers = [at("decode-0"), replace(at("prefill-0"), state="draining")]
    for question in (Question.READY, Question.ROUTER_ADMITTED):
        with pytest.raises(ClusterError, match="prefill-0 is draining"):
            answer(question, redis, *workers)


def test_without_redis_nobody_is_known_to_be_ready(raylet: int) -> None:
    with pytest.raises(ClusterError, match="Redis is away"):
        answer(Question.READY)


def test_the_command_says_yes_or_no_by_its_exit_status(raylet: int, redis: EmbeddedRedis) -> None:
    arguments = ["probe", "--node-ip", NODE_IP, "--cluster", CLUSTER]
    live = CliRunner().invoke(app, [*arguments, "--for", "live"])
    assert (live.exit_code, live.stdout) == (0, f"the Ray node at {NODE_IP} answers\n")
    environment = {"TANDEM_REDIS_URL": redis.url}
    ready = CliRunner().invoke(app, arguments, env=environment)
    assert (ready.exit_code, ready.stdout) == (0, "ready, without workers\n")
    admitted = CliRunner().invoke(app, [*arguments, "--for", "router-admitted"], env=environment)
    assert (admitted.exit_code, admitted.stderr) == (1, f"tandem: no worker has registered at {NODE_IP}\n")


def test_the_command_asks_for_redis_where_it_needs_one() -> None:
    result = CliRunner().invoke(app, ["probe", "--node-ip", NODE_IP], env={"TANDEM_REDIS_URL": ""})
    assert result.exit_code == 2
    assert "give --redis-url" in result.stderr
