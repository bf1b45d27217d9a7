"""How every benchmark ends: figures and ratios as a table for people and as JSON for `docs/benchmarks.md`.

A figure is a measured quantity with its unit in its name (`_ms`, `_gbps`, `_tokens_per_s`). A ratio compares two
figures of the same run on the same machine, so it means something elsewhere too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table


def _add_rows(table: Table, values: Mapping[str, float], kind: str) -> None:
    for name, value in values.items():
        table.add_row(kind, name, f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}")


def finish(figures: dict[str, float], ratios: dict[str, float], json_path: Path | None, title: str) -> None:
    """Prints one table; writes `{"figures": ..., "ratios": ...}` to `json_path` when there is one."""
    table = Table(title=title, title_justify="left")
    table.add_column("kind")
    table.add_column("name")
    table.add_column("value", justify="right")
    _add_rows(table, figures, "figure")
    table.add_section()
    _add_rows(table, ratios, "ratio")
    Console().print(table)
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps({"figures": figures, "ratios": ratios}, indent=2) + "\n")
