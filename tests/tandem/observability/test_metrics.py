"""Metric names follow Prometheus' conventions, each set has a registry of its own, and the documented list is true."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tandem.errors import HandoffFailed
from tandem.observability.document import SETS, TARGET, document
from tandem.observability.metric_set import MetricSet, MetricSpec
from tandem.observability.metrics import MAX_WORKERS, RouterMetrics
from tandem.rpc.tandem.v1 import common_pb2, inference_pb2
from tandem.types import WorkerId

SPECS = [spec for kind, _ in SETS.values() for spec in kind().specs]
BASE_UNITS = ("seconds", "bytes", "ratio")
SCALED_UNITS = ("ms", "milliseconds", "us", "mb", "gb", "kb", "percent", "minutes")


def samples_of(metrics: MetricSet) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(metrics.render().decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_a_name_has_prefix_base_unit_and_total(spec: MetricSpec) -> None:
    words = spec.name.split("_")
    assert words[0] == "tandem"
    assert words[1] in ("router", "prefill", "decode", "controller", "kv", "node", "store")
    assert (words[-1] == "total") == (spec.kind == "counter")
    assert not set(words) & set(SCALED_UNITS)
    if spec.unit in BASE_UNITS:
        assert words[-2 if spec.kind == "counter" else -1] == spec.unit
    assert spec.help.endswith(".")


def test_no_name_means_two_things() -> None:
    names = [spec.name for spec in SPECS]
    assert len(names) == len(set(names))


def test_the_documented_list_is_what_the_code_says() -> None:
    assert TARGET.read_text() == document()


def test_two_routers_in_one_process_do_not_share_counts() -> None:
    one, other = RouterMetrics(), RouterMetrics()
    one.requests.labels(code="ok").inc()
    assert b'tandem_router_requests_total{code="ok"} 1.0' in one.render()
    assert b'tandem_router_requests_total{code="ok"} 0.0' in other.render()


def test_workers_that_are_not_chosen_any_more_lose_their_series() -> None:
    metrics = RouterMetrics()
    for index in range(MAX_WORKERS + 10):
        metrics.routed("decode", WorkerId("decode-kept"))
        metrics.routed("decode", WorkerId(f"decode-{index}"))
    routed = {dict(labels)["worker"]: v for (name, labels), v in samples_of(metrics).items() if "routed" in name}
    assert len(routed) == MAX_WORKERS
    assert routed["decode-kept"] == MAX_WORKERS + 10
    assert "decode-0" not in routed


def test_hidden_and_exposed_transfer_are_booked_from_the_workers_timings() -> None:
    metrics = RouterMetrics()
    transfer = common_pb2.TransferTimings(num_bytes=1000, hidden_bytes=750, exposed_s=0.002)
    timings = inference_pb2.RequestTimings(
        prefill=common_pb2.PrefillTimings(transfer=transfer), decode_worker="decode-0"
    )
    metrics.ended("ok", timings)
    samples = samples_of(metrics)
    assert samples["tandem_router_transfer_bytes_total", ()] == 1000
    assert samples["tandem_router_transfer_hidden_bytes_total", ()] == 750
    assert samples["tandem_router_transfer_hidden_ratio_sum", ()] == 0.75
    assert samples["tandem_router_transfer_exposed_seconds_sum", ()] == pytest.approx(0.002)


@pytest.mark.parametrize(
    ("code", "timings", "outcome"),
    [
        ("ok", inference_pb2.RequestTimings(decode_worker="decode-0"), "delivered"),
        ("ok", inference_pb2.RequestTimings(), "not_needed"),
        (HandoffFailed.code, None, "failed"),
        ("link_closed", None, "failed"),
        ("cancelled", None, "aborted"),
    ],
)
def test_the_end_of_a_request_says_what_became_of_its_kv(
    code: str, timings: inference_pb2.RequestTimings | None, outcome: str
) -> None:
    metrics = RouterMetrics()
    metrics.ended(code, timings)
    handoffs = {key: v for key, v in samples_of(metrics).items() if key[0] == "tandem_router_handoffs_total"}
    booked = {dict(labels)["outcome"]: count for (_, labels), count in handoffs.items()}
    assert [name for name, count in booked.items() if count] == [outcome]
