"""The chart, installed for real: helm brings up router, head and workers as processes, and they serve.

The tests build on each other's deployment, in this order.
"""

from __future__ import annotations

import re
from pathlib import Path

import openai
import pytest
import yaml

from tests.e2e.live import run
from tests.helm.chart import preset, render
from tests.helm.test_network import of, reaches
from tests.kube.connections import connections_between_pods
from tests.kube.deployment import CHART, NAME, Deployment, installed, metrics_of
from tests.kube.helm import Tools
from tests.kube.load import MODEL, ask_at_length, ask_grpc, ask_http, load_on
from tests.kube.marks import marks_of_processes
from tests.kube.pods import is_over
from tests.kube.stand_in import StandIn
from tests.kube.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PRESET = CHART / "presets" / "one-node-cpu.yaml"
NUM_NODES = 2
NEW_TAG = "0.1.1"
HEAD = "app.kubernetes.io/component=head"
ALL = ("router", "head", "node", "valkey")
LONG_PROMPT = [(7 * i) % 200 + 3 for i in range(150)]


@pytest.fixture(scope="module")
def live(cluster: StandIn, tools: Tools, model: Path) -> Deployment:
    patience = f"node.replicas={NUM_NODES},router.lingerSeconds=2,config.replacement_timeout_s=150"  # cores are busy
    patience += ",config.pin_cores=false"  # each of both nodes would give its workers the same ones
    tiers = "workers.dramTier.size=32Mi,workers.ssdTier.type=emptyDir,workers.ssdTier.size=256Mi"
    return installed(cluster, tools, model, "-f", str(PRESET), "--set", f"{patience},{tiers}")


def test_what_helm_calls_ready_answers_over_grpc_and_http_with_the_right_tokens(
    live: Deployment, golden: tuple[int, ...], golden_text: str
) -> None:
    assert {name: len(live.pods(name)) for name in ALL} == {"router": 1, "head": 1, "node": NUM_NODES, "valkey": 1}
    assert run(ask_grpc(live.grpc)) == golden
    with openai.OpenAI(base_url=f"{live.http}/v1", api_key="none", max_retries=0) as client:
        text = ask_http(client, MODEL)
    assert text == golden_text


def test_helm_test_passes_and_would_not_where_rdma_is_asked_for_and_tcp_was_negotiated(
    live: Deployment, tmp_path: Path
) -> None:
    live.tools.helm("test", NAME, "--timeout", "60s")
    only = ["--show-only", "templates/tests/connection.yaml"]
    pod = yaml.safe_load(live.tools.helm("template", NAME, CHART, *live.values, "--set", "rdma.enabled=true", *only))
    pod["metadata"]["name"] = name = "rdma-canary"
    (tmp_path / "pod.yaml").write_text(yaml.safe_dump(pod))
    live.tools.kubectl("create", "-f", tmp_path / "pod.yaml")
    until(lambda: any(is_over(found) for found in live.pods("test") if found["metadata"]["name"] == name))
    said = live.tools.kubectl("logs", name)
    live.tools.kubectl("delete", "pod", name)
    assert re.search(r"KV moves from prefill-0 to decode-0 over .*: not over rdma, as it should", said), said


def test_network_policies_let_through_what_processes_have_open(live: Deployment) -> None:
    """The policies are evaluated: nothing enforces them here."""
    found = connections_between_pods(live.cluster)
    pairs = {(source, target) for source, target, _ in found}
    assert {("router", "node"), ("router", "valkey"), ("head", "valkey"), ("node", "valkey")} <= pairs
    assert {("head", "node"), ("node", "head")} & pairs
    policies = render(preset("one-node-cpu"))
    assert [edge for edge in sorted(found) if not reaches(policies, of(edge[0]), edge[1], edge[2])] == []


def test_a_prompt_that_comes_again_is_found_again_and_lies_on_the_pod_s_disk(live: Deployment) -> None:
    cold = run(ask_at_length(live.grpc, LONG_PROMPT, salt="cold"))
    first = run(ask_at_length(live.grpc, LONG_PROMPT))
    tiers = live.volumes("node", "ssd-tier")
    until(
        lambda: any(segment for tier in tiers for segment in tier.glob("segment-*.kv")),
        what=lambda: live.tools.kubectl("logs", "-l", HEAD),
    )
    again = run(ask_at_length(live.grpc, LONG_PROMPT))
    assert first.tokens == again.tokens == cold.tokens
    assert [answer.usage.cached_tokens for answer in (cold, first) if answer.usage] == [0, 0]
    assert again.usage is not None
    assert again.usage.cached_tokens == (len(LONG_PROMPT) - 1) // 16 * 16


def test_every_metric_of_the_dashboards_is_on_a_page_of_some_pod(live: Deployment) -> None:
    pages = "\n".join(metrics_of(live.cluster).values())
    exported = set(re.findall(r"^# TYPE (\w+) ", pages, flags=re.MULTILINE))
    series = exported | {f"{name}{end}" for name in exported for end in ("_bucket", "_sum", "_count")}
    named = {
        name
        for path in (CHART / "dashboards").glob("*.json")
        for name in re.findall(r"\btandem_\w+", path.read_text())
    }
    assert named
    assert named - series == set()


def test_another_decode_size_scales_only_the_decode_pool_and_a_rollback_takes_it_back(live: Deployment) -> None:
    before = {component: live.uids(component) for component in ALL}
    prefill, decode = live.workers("prefill"), live.workers("decode")
    secrets = live.secrets()
    live.upgrade("--set", "decode.replicas=2")
    live.until_sizes(1, 2)
    assert live.workers("prefill") == prefill
    assert decode.items() < live.workers("decode").items()
    live.tools.helm("rollback", NAME, "1", "--wait", "--timeout", "60s")
    live.until_sizes(1, 1)
    assert live.workers("prefill") == prefill
    assert live.secrets() == secrets
    assert "password" in secrets["live-tandem-valkey"]  # drawn at the install, as the cluster's key
    assert {component: live.uids(component) for component in before} == before


def test_a_rolling_upgrade_to_another_image_loses_no_request(
    live: Deployment, golden: tuple[int, ...], golden_text: str
) -> None:
    ours = ("router", "head", "node")
    before = {component: live.uids(component) for component in ours}
    with load_on(live.grpc, live.http, MODEL) as load:
        until(lambda: len(load.tokens) >= 2 and len(load.texts) >= 2)
        live.upgrade("--set", f"image.tag={NEW_TAG}")
        live.until_settled("router", 1)
        live.until_settled("node", NUM_NODES)
        live.until_sizes(1, 1)
    for component in ours:
        assert live.uids(component).isdisjoint(before[component])
        assert live.tags(component) == {NEW_TAG}
    assert load.errors == []
    assert set(load.tokens) == {golden}
    assert set(load.texts) == {golden_text}


def test_an_uninstalled_chart_leaves_no_pod_and_no_process(live: Deployment) -> None:
    pods = live.cluster.store.list("v1", "pods")
    live.uninstall()
    assert live.killed() == []
    assert not {pod["metadata"]["uid"] for pod in pods} & {mark.split("/")[0] for mark in marks_of_processes()}
