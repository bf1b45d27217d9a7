"""Alerts, dashboards, monitors and scalers ask for metrics that exist, in expressions that parse."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.errors import BY_CODE
from tests.helm.chart import CHART, ROOT, Object, find, kinds, render
from tests.helm.metrics import dashboard_expressions, exported, selectors, unknown

ALL: dict[str, Any] = {
    "metrics": {
        "rules": {"enabled": True, "minTransferBytesPerSecond": 10**10, "ttftSeconds": 3, "runbookUrl": "https://r"},
        "dashboards": {"enabled": True},
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "podMonitor": {"enabled": True},
    },
    "rdma": {"enabled": True},
}
KEDA: dict[str, Any] = {
    "topology": {"mode": "pool"},
    "autoscaling": {"mode": "keda", "keda": {"prometheusAddress": "http://p:9090"}},
}


def alerts(objects: list[Object]) -> dict[str, Object]:
    groups = find(objects, "PrometheusRule")["spec"]["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


@functools.cache
def all_alerts() -> dict[str, Object]:
    return alerts(render(ALL))


@pytest.mark.parametrize("name", all_alerts())
def test_an_alert_asks_for_metrics_of_this_release_that_exist(name: str) -> None:
    rule = all_alerts()[name]
    assert unknown(rule["expr"]) == []
    assert all({"namespace", "pod"} <= labels for _, labels in selectors(rule["expr"]))
    assert 'namespace="llm",pod=~"demo-tandem-.*"' in rule["expr"]


@pytest.mark.parametrize("name", all_alerts())
def test_an_alert_says_what_is_wrong_and_where_to_look(name: str) -> None:
    rule = all_alerts()[name]
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    assert rule["labels"]["severity"] in ("info", "warning", "critical")
    assert not set(rule["expr"].split()) & {"TTFT_SECONDS", "TBT_SECONDS", "MIN_BYTES_PER_SECOND"}


def test_thresholds_are_the_values() -> None:
    assert all_alerts()["TandemSlowFirstToken"]["expr"].strip().endswith("> 3")
    assert all_alerts()["TandemTransferSlow"]["expr"].strip().endswith("< 10000000000")


def test_alerts_that_make_no_sense_here_are_left_out() -> None:
    rules = {"metrics": {"rules": {"enabled": True}}}
    assert {"TandemTransferFallback", "TandemTransferSlow"}.isdisjoint(alerts(render(rules)))
    assert "TandemPoolShort" in alerts(render(rules))
    assert "TandemPoolShort" not in alerts(render(rules, KEDA))


def test_the_alert_on_errors_knows_every_code_and_leaves_out_the_clients_own() -> None:
    expression = all_alerts()["TandemErrors"]["expr"]
    codes = set(expression.partition('code=~"')[2].partition('"')[0].split("|"))
    clients = {
        "invalid_request",
        "context_length_exceeded",
        "model_not_found",
        "request_not_found",
        "duplicate_request",
    }
    start = {"config_error", "model_load_error", "cluster_error"}
    start |= {"store_error", "directory_in_use", "foreign_directory"}
    assert codes == set(BY_CODE) - clients - start - {"cancelled", "invalid_api_key"} | {"internal"}


PLACE_LABELS = 'namespace="llm",pod="demo-tandem-x"'
CASES: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "alert_cases.yaml").read_text())


def promtool_case(name: str, case: Any) -> Object:
    """A test in promtool's form: the alert fires at its time, with its words."""
    rule = all_alerts()[name]
    words = {**rule["annotations"], "summary": case["summary"]}
    fires = {"exp_labels": {**rule["labels"], **case.get("labels", {})}, "exp_annotations": words}
    series = [{"series": k.replace("P", PLACE_LABELS, 1), "values": v} for k, v in case["series"].items()]
    return {
        "interval": "1m",
        "input_series": series,
        "alert_rule_test": [
            {"eval_time": case["at"], "alertname": name, "exp_alerts": [fires]},
            {"eval_time": "0m", "alertname": name, "exp_alerts": []},
        ],
    }


def test_every_rule_is_accepted_and_fires_by_prometheus_own_tool(tmp_path: Path) -> None:
    tool = shutil.which("promtool", path=f"{ROOT / '.tools' / 'bin'}:{os.environ['PATH']}")
    if tool is None:
        pytest.skip("no promtool here: `make helm-tools` brings it on Debian and its kin")
    rules, cases = tmp_path / "rules.yaml", tmp_path / "cases.yaml"
    rules.write_text(yaml.safe_dump(find(render(ALL), "PrometheusRule")["spec"]))
    tests = [promtool_case(name, case) for name, case in CASES.items()]
    cases.write_text(yaml.safe_dump({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": tests}))
    for command in ([tool, "check", "rules", rules], [tool, "test", "rules", cases]):
        outcome = subprocess.run(command, capture_output=True, text=True)
        assert outcome.returncode == 0, outcome.stdout + outcome.stderr


def test_every_alert_has_a_case() -> None:
    assert set(CASES) == set(all_alerts())


@pytest.mark.parametrize("name", dashboard_expressions())
def test_a_dashboard_asks_for_metrics_that_exist(name: str) -> None:
    assert [text for expression in dashboard_expressions()[name] for text in unknown(expression)] == []


def test_every_metric_of_use_is_on_a_dashboard() -> None:
    shown = {name for texts in dashboard_expressions().values() for text in texts for name, _ in selectors(text)}
    shown |= {name for rule in all_alerts().values() for name, _ in selectors(rule["expr"])}
    parts = ("_sum", "_count")
    missing = {name for name in exported() if name not in shown and not name.endswith(parts)}
    assert missing == NOT_SHOWN


NOT_SHOWN = {
    "tandem_prefill_batch_sequences_bucket",
    "tandem_prefill_batch_tokens_bucket",
    "tandem_prefill_requests_total",
    "tandem_prefill_handoffs_total",
    "tandem_prefill_transfer_bytes_total",
    "tandem_prefill_running_requests",
    "tandem_prefill_waiting_requests",
    "tandem_prefill_draining",
    "tandem_kv_link_messages_total",
    "tandem_decode_batch_sequences_bucket",
    "tandem_decode_queue_seconds_bucket",
    "tandem_decode_requests_total",
    "tandem_decode_handoffs_total",
    "tandem_decode_draining",
    "tandem_decode_received_bytes_total",
    "tandem_decode_received_messages_total",
    "tandem_router_transfer_hidden_ratio_bucket",
    "tandem_store_loans",
    "tandem_store_grants",
    "tandem_store_reserved_blocks",
    "tandem_controller_pool_generation",
    "tandem_controller_reconcile_seconds_bucket",
}
"""What only an investigation needs. A new metric goes onto a dashboard, or here on purpose."""


def test_dashboards_are_config_maps_for_grafana_s_sidecar() -> None:
    maps = [o for o in kinds(render(ALL), "ConfigMap") if "dashboard" in o["metadata"]["name"]]
    assert len(maps) == len(list((CHART / "dashboards").glob("*.json"))) == 4
    for o in maps:
        assert o["metadata"]["labels"]["grafana_dashboard"] == "1"
        ((name, text),) = o["data"].items()
        assert json.loads(text)["uid"] == name.removesuffix(".json")


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_a_scaler_asks_for_metrics_that_exist_and_never_for_utilisation(name: str) -> None:
    for trigger in find(render(KEDA), "ScaledObject", f"-{name}")["spec"]["triggers"]:
        assert unknown(trigger["metadata"]["query"]) == []
        assert float(trigger["metadata"]["threshold"]) > 0


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("sum(tandem_router_requests{code='ok'})", "no metric tandem_router_requests"),
        ("rate(tandem_router_retries_total{kode='x'}[1m])", "tandem_router_retries_total has no label kode"),
        ("1 - (max(tandem_decode_bloks) / 2)", "no metric tandem_decode_bloks"),
    ],
)
def test_what_nobody_exports_is_found(expression: str, problem: str) -> None:
    assert unknown(expression) == [problem]


def test_monitors_carry_the_labels_that_prometheus_selects_by() -> None:
    assert find(render(ALL), "ServiceMonitor")["metadata"]["labels"]["release"] == "prometheus"


def test_routers_with_tls_are_scraped_with_tls() -> None:
    values = {"metrics": {"serviceMonitor": {"enabled": True}}, "tls": {"secretName": "server"}}
    (endpoint,) = find(render(values), "ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["scheme"] == "https"
    assert endpoint["tlsConfig"]["ca"]["secret"] == {"name": "server", "key": "ca.crt"}
