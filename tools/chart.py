"""What is generated for the Helm chart: its values' schema, the page of values, the dashboards.

`python -m tools.chart` writes them, with `--check` it only says whether they are up to date (exit status 1).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from tandem.config import ClusterConfig
from tools.chart_page import page
from tools.dashboards import dashboard
from tools.docstrings import field_docstrings

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "helm" / "tandem"
SOURCE = ROOT / "helm" / "values.schema.yaml"
DASHBOARDS = ROOT / "helm" / "dashboards.yaml"

SET_BY_CHART = frozenset(
    {
        "model.source",
        "model.served_name",
        "registry.redis_url",
        "router.host",
        "router.grpc_port",
        "router.http_port",
        "router.health_port",
        "router.linger_s",
        "router.tls_cert_file",
        "router.tls_key_file",
        "router.tls_client_ca_file",
        "router.api_keys_file",
        "controller_metrics_port",
        *(f"{pool}.{name}" for pool in ("prefill", "decode") for name in ("num_workers", "tensor_parallel")),
        *(f"{pool}.pipeline_parallel" for pool in ("prefill", "decode")),
        *(f"prefix_store.{name}" for name in ("host_bytes", "disk_bytes", "disk_path")),
    }
)
"""Fields of the configuration that follow from other values, and cannot be given under `config`."""
_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean"}


def config_fields(cls: Any = ClusterConfig, path: str = "") -> Iterator[str]:
    """Dotted names of all fields of the configuration."""
    for name, hint in get_type_hints(cls).items():
        if is_dataclass(hint):
            yield from config_fields(hint, f"{path}{name}.")
        else:
            yield f"{path}{name}"


def config_schema(cls: Any = ClusterConfig, path: str = "") -> dict[str, Any]:
    """JSON schema of what may be given of the configuration. Bounds are the configuration's own to check."""
    docs = field_docstrings(cls)
    properties: dict[str, Any] = {}
    for name, hint in get_type_hints(cls).items():
        if f"{path}{name}" in SET_BY_CHART:
            continue
        schema = config_schema(hint, f"{path}{name}.") if is_dataclass(hint) else _scalar(hint)
        properties[name] = schema | ({"description": docs[name]} if docs.get(name) else {})
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _scalar(hint: Any) -> dict[str, Any]:
    if get_origin(hint) is Literal:
        return {"enum": list(get_args(hint))}
    return {"type": _TYPES[hint]}


def values_schema() -> dict[str, Any]:
    """The whole schema of the values."""
    schema: dict[str, Any] = yaml.safe_load(SOURCE.read_text())
    shared = {name: value for name, value in schema["$defs"].items() if not name.endswith("Keys")}
    schema["$defs"] = shared | {"config": config_schema()}
    _name_keys(schema)
    return schema


NO_SUCH_KEY = "no such key; there are "


def _name_keys(schema: Any) -> None:
    """To each object that takes no other keys: which it takes. The error then names them.

    As a value that no key of another name can have: for `propertyNames`, helm's engine names some other place.
    """
    if isinstance(schema, list):
        for part in schema:
            _name_keys(part)
    elif isinstance(schema, dict):
        for part in list(schema.values()):
            _name_keys(part)
        if schema.get("additionalProperties") is False:
            schema["additionalProperties"] = {"const": f"{NO_SUCH_KEY}{', '.join(schema['properties'])}"}


def generated() -> dict[Path, str]:
    """Every generated file and its text."""
    schema = values_schema()
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    dashboards = yaml.safe_load(DASHBOARDS.read_text())
    return {
        CHART / "values.schema.json": json.dumps(schema, indent=1, ensure_ascii=False) + "\n",
        ROOT / "docs" / "helm-values.md": page(schema, values),
        **{CHART / "dashboards" / f"{name}.json": dashboard(name, source) for name, source in dashboards.items()},
    }


def main() -> int:
    """Exit status 1 when `--check` finds something stale."""
    parser = argparse.ArgumentParser(description="Write what is generated for the Helm chart.")
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    check = parser.parse_args().check
    stale = {path: text for path, text in generated().items() if not path.exists() or path.read_text() != text}
    for path, text in stale.items():
        if check:
            print(f"{path.relative_to(ROOT)} is stale; run: python -m tools.chart")
        else:
            path.write_text(text)
    return 1 if check and stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
