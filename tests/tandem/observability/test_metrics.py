"""Metric names follow Prometheus' conventions, and each set has a registry of its own."""

from __future__ import annotations

from tandem.observability.metrics import RouterMetrics


def test_names_have_the_prefix_and_a_unit_or_total():
    for metric in RouterMetrics().registry.collect():
        assert metric.name.startswith("tandem_router_")
        assert metric.documentation.endswith(".")
        if metric.type == "histogram":
            assert metric.name.endswith("_seconds")


def test_two_routers_in_one_process_do_not_share_counts():
    one, other = RouterMetrics(), RouterMetrics()
    one.requests.labels(code="ok").inc()
    assert b'tandem_router_requests_total{code="ok"} 1.0' in one.render()
    assert b'code="ok"' not in other.render()
