"""Which metrics and labels an expression of Prometheus asks for, and which ones Tandem's processes export."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import promql_parser

from tandem.observability.document import SETS
from tests.helm.chart import CHART

PLACE = frozenset({"namespace", "pod", "job", "instance", "container", "le"})
"""Labels that Prometheus or a histogram adds."""


def exported() -> Mapping[str, frozenset[str]]:
    """Name of each exported series, and its labels of our own."""
    found: dict[str, frozenset[str]] = {}
    for kind, _ in SETS.values():
        for spec in kind().specs:
            names = [spec.name]
            if spec.kind == "histogram":
                names = [f"{spec.name}_{part}" for part in ("bucket", "sum", "count")]
            found |= dict.fromkeys(names, frozenset(spec.labels))
    return found


def selectors(expression: str) -> Iterator[tuple[str, frozenset[str]]]:
    """(metric, labels it is selected by) of every selector. Raises ValueError for what is no expression."""
    for selector in _walk(promql_parser.parse(expression)):
        yield selector.name, frozenset(matcher.name for matcher in selector.matchers.matchers)


def _walk(node: Any) -> Iterator[Any]:
    if isinstance(node, promql_parser.VectorSelector):
        yield node
    for name in ("expr", "lhs", "rhs", "vector_selector", "param"):
        if (inner := getattr(node, name, None)) is not None:
            yield from _walk(inner)
    for argument in getattr(node, "args", []) or []:
        yield from _walk(argument)


def unknown(expression: str) -> list[str]:
    """What it asks for and nobody exports."""
    known = exported()
    found = []
    for name, labels in selectors(expression):
        if name not in known:
            found.append(f"no metric {name}")
        else:
            found += [f"{name} has no label {label}" for label in sorted(labels - known[name] - PLACE)]
    return found


def dashboard_expressions() -> dict[str, list[str]]:
    """Every expression of each dashboard, Grafana's variables filled in."""
    return {path.stem: _of_dashboard(json.loads(path.read_text())) for path in (CHART / "dashboards").glob("*.json")}


def _of_dashboard(model: Mapping[str, Any]) -> list[str]:
    texts = [target["expr"] for panel in model["panels"] for target in panel["targets"]]
    return [
        text.replace("$__rate_interval", "5m").replace("$namespace", "llm").replace("$release", "demo")
        for text in texts
    ]
