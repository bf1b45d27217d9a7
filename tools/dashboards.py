"""Grafana's JSON from helm/dashboards.yaml: layout, variables and the selection of one release are added here."""

from __future__ import annotations

import json
import re
from typing import Any

SELECTION = 'namespace="$namespace",pod=~"$release-.*"'
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 3
_QUANTILES = (0.5, 0.9, 0.99)


def dashboard(name: str, source: dict[str, Any]) -> str:
    """The JSON text of one dashboard."""
    model = {
        "uid": f"tandem-{name}",
        "title": source["title"],
        "tags": ["tandem"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_datasource(), *_variables()]},
        "panels": [_panel(index, panel) for index, panel in enumerate(source["panels"])],
    }
    return json.dumps(model, indent=1) + "\n"


def expressions(panel: dict[str, Any]) -> list[tuple[str, str]]:
    """(expression, legend) of each line of a panel, the release selected."""
    if metric := panel.get("quantiles"):
        rate = f"sum by (le) (rate({metric}_bucket{{}}[$__rate_interval]))"
        lines = [(f"histogram_quantile({quantile}, {rate})", f"p{quantile * 100:g}") for quantile in _QUANTILES]
    else:
        lines = [(line["expr"], line["legend"]) for line in (panel, *panel.get("more", []))]
    return [(_select(expression), legend) for expression, legend in lines]


def _select(expression: str) -> str:
    """To every selector the release's pods; `{` opens nothing else in the language."""
    return re.sub(r"\{([^}]*)\}", lambda match: "{" + ",".join(filter(None, (match[1], SELECTION))) + "}", expression)


def _panel(index: int, panel: dict[str, Any]) -> dict[str, Any]:
    row, column = divmod(index, _COLUMNS)
    is_table = panel.get("kind") == "table"
    targets = [
        {
            "refId": chr(ord("A") + number),
            "datasource": _DATASOURCE,
            "expr": expression,
            "legendFormat": legend,
            **({"format": "table", "instant": True} if is_table else {}),
        }
        for number, (expression, legend) in enumerate(expressions(panel))
    ]
    return {
        "id": index + 1,
        "type": "table" if is_table else "timeseries",
        "title": panel["title"],
        "datasource": _DATASOURCE,
        "gridPos": {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel["unit"], "min": 0}, "overrides": []},
        "targets": targets,
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}


def _variables() -> list[dict[str, Any]]:
    """The namespace, and in it the release: what stands before -router in its pods' names."""
    metric = "tandem_router_running_requests"
    queries = {
        "namespace": (f"label_values({metric}, namespace)", ""),
        "release": (f'label_values({metric}{{namespace="$namespace"}}, pod)', "/(.+)-router-.*/"),
    }
    return [
        {
            "name": name,
            "type": "query",
            "datasource": _DATASOURCE,
            "query": {"query": query, "refId": name},
            "regex": regex,
            "refresh": 2,
            "label": name.capitalize(),
        }
        for name, (query, regex) in queries.items()
    ]
