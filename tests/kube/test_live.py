"""The chart, installed for real: helm brings up router, head and workers as processes, and they serve.

The tests build on each other's deployment, in this order.
"""

from __future__ import annotations

import re
from pathlib import Path

import openai
import pytest
from transformers import AutoTokenizer

from tandem.model.files import resolve_model
from tests.e2e.live import run
from tests.kube.deployment import CHART, Deployment, installed, metrics_of
from tests.kube.helm import Tools
from tests.kube.load import NUM_TOKENS, PROMPT, ask_at_length, ask_grpc, ask_http, load_on
from tests.kube.marks import marks_of_processes
from tests.kube.stand_in import StandIn
from tests.kube.waiting import until
from tests.oracle import Oracle, golden_tokens
from tests.tiny_model import save_tiny_llama

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
PRESET = CHART / "presets" / "one-node-cpu.yaml"
MODEL = "tiny"
HEAD = "app.kubernetes.io/component=head"
LONG_PROMPT = [(7 * i) % 200 + 3 for i in range(150)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model") / MODEL, num_kv_heads=2)


@pytest.fixture(scope="module")
def golden(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, ...]:
    oracle = Oracle(resolve_model(str(model)), tmp_path_factory.mktemp("oracle"))
    return golden_tokens(oracle, AutoTokenizer.from_pretrained(model).encode(PROMPT), NUM_TOKENS)


@pytest.fixture(scope="module")
def golden_text(model: Path, golden: tuple[int, ...]) -> str:
    return str(AutoTokenizer.from_pretrained(model).decode(golden, skip_special_tokens=True))


@pytest.fixture(scope="module")
def live(cluster: StandIn, tools: Tools, model: Path) -> Deployment:
    patience = "config.replacement_timeout_s=150"  # these cores are shared, and busy
    tiers = "workers.dramTier.size=32Mi,workers.ssdTier.type=emptyDir,workers.ssdTier.size=256Mi"
    return installed(cluster, tools, model, "-f", str(PRESET), "--set", f"{patience},{tiers}")


def test_what_helm_calls_ready_answers_over_grpc_and_http_with_the_right_tokens(
    live: Deployment, golden: tuple[int, ...], golden_text: str
) -> None:
    assert {len(live.pods(component)) for component in ("router", "head", "node", "valkey")} == {1}
    assert run(ask_grpc(live.grpc)) == golden
    with openai.OpenAI(base_url=f"{live.http}/v1", api_key="none", max_retries=0) as client:
        text = ask_http(client, MODEL)
    assert text == golden_text


def test_helm_test_passes(live: Deployment) -> None:
    live.tools.helm("test", "live", "--timeout", "60s")


def test_a_prompt_that_comes_again_is_found_again_and_lies_on_the_pod_s_disk(live: Deployment) -> None:
    cold = run(ask_at_length(live.grpc, LONG_PROMPT, salt="cold"))
    first = run(ask_at_length(live.grpc, LONG_PROMPT))
    tier = live.volume("node", "ssd-tier")
    until(lambda: any(tier.glob("segment-*.kv")), what=lambda: live.tools.kubectl("logs", "-l", HEAD))
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


def test_another_decode_size_scales_only_the_decode_pool(live: Deployment) -> None:
    before = {component: live.uids(component) for component in ("router", "head", "node", "valkey")}
    prefill, decode = live.workers("prefill"), live.workers("decode")
    secrets = live.secrets()
    live.upgrade("--set", "decode.replicas=2")
    live.until_sizes(1, 2)
    assert live.secrets() == secrets
    assert "password" in secrets["live-tandem-valkey"]  # drawn at the install, as the cluster's key
    assert {component: live.uids(component) for component in before} == before
    assert live.workers("prefill") == prefill
    assert decode.items() < live.workers("decode").items()


def test_a_rolling_upgrade_of_the_router_loses_no_request(
    live: Deployment, golden: tuple[int, ...], golden_text: str
) -> None:
    before = {component: live.uids(component) for component in ("router", "head", "node")}
    with load_on(live.grpc, live.http, MODEL) as load:
        until(lambda: len(load.tokens) >= 2 and len(load.texts) >= 2)
        live.upgrade("--set", "decode.replicas=2,router.podAnnotations.round=two")
        live.until_settled("router", 1)
    assert live.uids("router").isdisjoint(before["router"])
    assert (live.uids("head"), live.uids("node")) == (before["head"], before["node"])
    assert load.errors == []
    assert set(load.tokens) == {golden}
    assert set(load.texts) == {golden_text}


def test_a_rolling_upgrade_of_the_nodes_loses_no_request(
    live: Deployment, golden: tuple[int, ...], golden_text: str
) -> None:
    sizes = "decode.replicas=2,prefill.replicas=2,node.replicas=2,router.podAnnotations.round=two"
    live.upgrade("--set", sizes)
    live.until_sizes(2, 2)
    before = live.uids("node")
    with load_on(live.grpc, live.http, MODEL) as load:
        until(lambda: len(load.tokens) >= 2 and len(load.texts) >= 2)
        live.upgrade("--set", f"{sizes},workers.podAnnotations.round=two")
        live.until_settled("node", 2)
        live.until_sizes(2, 2)
    assert live.uids("node").isdisjoint(before)
    assert load.errors == []
    assert set(load.tokens) == {golden}
    assert set(load.texts) == {golden_text}


def test_an_uninstalled_chart_leaves_no_pod_and_no_process(live: Deployment) -> None:
    pods = live.cluster.store.list("v1", "pods")
    live.uninstall()
    assert not {pod["metadata"]["uid"] for pod in pods} & {mark.split("/")[0] for mark in marks_of_processes()}
