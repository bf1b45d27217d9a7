"""The chart, rendered in this process as Helm would: values in, Kubernetes objects out."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import helm_python
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "tandem"
PRESETS = sorted(path.stem for path in (CHART / "presets").glob("*.yaml"))
FIXED: dict[str, Any] = {"valkey": {"password": "golden"}, "auth": {"clusterKey": "0123456789abcdef" * 4}}
"""What would else be drawn at random."""

Object = dict[str, Any]


@functools.cache
def chart(directory: Path = CHART) -> helm_python.Chart:
    """Loaded once; renders share it."""
    return helm_python.Chart.load(directory)


def merged(*values: Mapping[str, Any]) -> dict[str, Any]:
    """Later ones win, section by section."""
    result: dict[str, Any] = {}
    for layer in values:
        for key, value in layer.items():
            inner = result.get(key)
            both = isinstance(value, Mapping) and isinstance(inner, Mapping)
            result[key] = merged(inner, value) if both else copy.deepcopy(value)
    return result


def preset(name: str) -> dict[str, Any]:
    """A preset's values."""
    values: dict[str, Any] = yaml.safe_load((CHART / "presets" / f"{name}.yaml").read_text())
    return values


def render(*values: Mapping[str, Any], revision: int = 1, directory: Path = CHART) -> list[Object]:
    """The objects of release `demo` in namespace `llm`, the schema checked. Raises helm_python.HelmError."""
    texts = _texts(json.dumps(merged(FIXED, *values), sort_keys=True), revision, directory)
    objects = []
    for path, text in texts.items():
        if not path.endswith("NOTES.txt"):
            objects += [document for document in yaml.load_all(text, yaml.CSafeLoader) if document]
    return sorted(objects, key=lambda o: (o["kind"], o["metadata"]["name"]))


@functools.cache
def _texts(values: str, revision: int, directory: Path) -> dict[str, str]:
    given, loaded = json.loads(values), chart(directory)
    loaded.validate_schema(given)
    texts: dict[str, str] = loaded.render(given, name="demo", namespace="llm", revision=revision)
    return texts


def notes(*values: Mapping[str, Any]) -> str:
    """What Helm prints after an install."""
    texts = chart().render(merged(FIXED, *values), name="demo", namespace="llm")
    return next(text for path, text in texts.items() if path.endswith("NOTES.txt"))


def find(objects: list[Object], kind: str, name: str = "") -> Object:
    """The one object of that kind whose name ends with `name`."""
    (found,) = [o for o in objects if o["kind"] == kind and o["metadata"]["name"].endswith(name)]
    return found


def kinds(objects: list[Object], kind: str) -> list[Object]:
    """All objects of a kind."""
    return [o for o in objects if o["kind"] == kind]


def pods(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    """(where, {metadata, spec}) of every pod that the objects lead to."""
    for o in objects:
        name = f"{o['kind']}/{o['metadata']['name']}"
        if o["kind"] == "Pod":
            yield name, o
        elif o["kind"] in ("Deployment", "StatefulSet"):
            yield name, o["spec"]["template"]
        elif o["kind"] == "RayCluster":
            yield f"{name}/head", o["spec"]["headGroupSpec"]["template"]
            for group in o["spec"]["workerGroupSpecs"]:
                yield f"{name}/{group['groupName']}", group["template"]


def worker_pod(objects: list[Object], name: str) -> Object:
    """The pod of one component of workers: node, prefill or decode."""
    (found,) = [
        p for _, p in pods(objects) if p["metadata"].get("labels", {}).get("app.kubernetes.io/component") == name
    ]
    return found


def containers(pod: Object) -> list[Object]:
    """All of a pod, the init ones first."""
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def config(objects: list[Object]) -> dict[str, Any]:
    """The cluster's configuration in the render."""
    values: dict[str, Any] = yaml.safe_load(find(objects, "ConfigMap", "-config")["data"]["config.yaml"])
    return values


def quantity(text: str) -> int:
    """Bytes of a quantity in Mi, Gi or plain."""
    for unit, factor in (("Ki", 2**10), ("Mi", 2**20), ("Gi", 2**30), ("Ti", 2**40)):
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * factor)
    return int(text)
