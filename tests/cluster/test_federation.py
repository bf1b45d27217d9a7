"""One page for the workers of a node: real pages of real metric sets, found in a real Valkey."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
from prometheus_client.parser import text_string_to_metric_families

from cluster.embedded_redis import EmbeddedRedis
from cluster.federation import serve_node_metrics
from tandem.observability.metric_set import MetricSet
from tandem.observability.server import serve_metrics
from tandem.observability.worker_metrics import DecodeMetrics, PrefillMetrics
from tandem.registry import Registry
from tests.metadata import CLUSTER, registry_of, stores_of, valkey, worker_record
from tests.router_harness import runs_async
from tests.store_nodes import store_node

NODE_IP = "127.0.0.1"


@asynccontextmanager
async def pages(registry: Registry, sets: Mapping[str, MetricSet]) -> AsyncIterator[None]:
    """Registered workers with these metrics."""
    async with AsyncExitStack() as stack:
        for worker_id, metrics in sets.items():
            server = await serve_metrics(metrics.registry, NODE_IP)
            stack.push_async_callback(server.stop)
            await registry.put(worker_record(worker_id, metrics_url=server.url))
        yield


async def scraped(server: EmbeddedRedis, registry: Registry) -> dict[tuple[str, str], float]:
    """Value of each series of the node's page without further labels, by name and worker."""
    async with stores_of(server) as stores, httpx.AsyncClient(trust_env=False, verify=False) as http:
        node = await serve_node_metrics(registry, stores, node_ip=NODE_IP, port=0)
        try:
            text = (await http.get(node.url)).text
        finally:
            await node.stop()
    assert len(names := [line for line in text.splitlines() if line.startswith("# TYPE")]) == len(set(names))
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(s.name, s.labels.get("worker", "")): s.value for s in samples if set(s.labels) <= {"worker"}}


@runs_async
async def test_series_of_all_workers_are_on_one_page_each_family_once_and_told_apart_by_worker() -> None:
    first, second, prefill = DecodeMetrics(), DecodeMetrics(), PrefillMetrics()
    first.iteration(0.5, num_sequences=1)
    second.iteration(0.25, num_sequences=1)
    second.iteration(0.25, num_sequences=1)
    async with valkey() as server, registry_of(server) as registry:
        await registry.put(worker_record("decode-9", address="127.0.0.9:1", metrics_url="http://127.0.0.9:1/metrics"))
        async with pages(registry, {"decode-0": first, "decode-1": second, "prefill-0": prefill}):
            found = await scraped(server, registry)
    assert found["tandem_decode_iteration_seconds_count", "decode-0"] == 1
    assert found["tandem_decode_iteration_seconds_count", "decode-1"] == 2
    assert found["tandem_prefill_iteration_seconds_count", "prefill-0"] == 0
    assert found["tandem_node_workers", ""] == 3
    assert {worker for name, worker in found if name == "process_cpu_seconds_total"} == {
        "",
        "decode-0",
        "decode-1",
        "prefill-0",
    }


@runs_async
async def test_a_worker_that_does_not_answer_is_left_out_and_said_to_be_down() -> None:
    async with valkey() as server, registry_of(server) as registry:
        await registry.put(worker_record("decode-1", metrics_url="http://127.0.0.1:1/metrics"))
        async with pages(registry, {"decode-0": DecodeMetrics()}):
            found = await scraped(server, registry)
    assert found["tandem_node_worker_up", "decode-0"] == 1
    assert found["tandem_node_worker_up", "decode-1"] == 0
    assert ("tandem_decode_iteration_seconds_count", "decode-1") not in found


@runs_async
async def test_while_redis_is_away_the_last_known_workers_are_asked() -> None:
    async with (
        valkey() as server,
        registry_of(server) as registry,
        stores_of(server) as stores,
        pages(registry, {"decode-0": DecodeMetrics()}),
    ):
        node = await serve_node_metrics(registry, stores, node_ip=NODE_IP, port=0)
        async with httpx.AsyncClient(trust_env=False, verify=False) as http:
            await http.get(node.url)
            server.stop()
            assert 'tandem_node_worker_up{worker="decode-0"} 1.0' in (await http.get(node.url)).text
        await node.stop()


@runs_async
async def test_the_store_of_the_node_is_on_its_page_and_is_no_worker() -> None:
    async with (
        valkey() as server,
        registry_of(server) as registry,
        store_node(server.url, "n1") as host,
        pages(registry, {"decode-0": DecodeMetrics()}),
    ):
        found = await scraped(server, registry)
    assert found["tandem_store_clients", host.record.owner] == 0
    assert found["tandem_node_workers", ""] == 1
    assert ("tandem_node_worker_up", host.record.owner) not in found


@runs_async
async def test_the_command_serves_the_page_until_it_is_told_to_stop() -> None:
    async with valkey() as server:
        url, status = serve_by_command(server)
    assert url.startswith(f"http://{NODE_IP}:")
    assert status == 0


def serve_by_command(server: EmbeddedRedis) -> tuple[str, int]:
    """What it says it serves, and its exit status after SIGTERM."""
    command = [sys.executable, "-m", "cluster.cli", "node-metrics", "--node-ip", NODE_IP, "--cluster", CLUSTER]
    process = subprocess.Popen([*command, "--redis-url", server.url], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    url = process.stdout.readline().removeprefix("metrics at ").strip()
    assert httpx.get(url, trust_env=False).status_code == 200
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    return url, process.returncode
