"""What an API server would say of an object: by Kubernetes' schemas, slim ones of ours, full CRDs where they lie."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from referencing import Registry, Resource

from tests.helm.chart import ROOT, Object, pods

SLIM: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "schemas.yaml").read_text())
CRDS = Path(os.environ.get("TANDEM_TEST_CRDS", ROOT.parent / "shared" / "crds"))
"""KubeRay's own definitions; not part of this project."""
_ENVELOPE = {"apiVersion": {"type": "string"}, "kind": {"type": "string"}, "metadata": {"type": "object"}}
_NUMBERS = ("int32", "int64", "double", "float")
_UNUSED = ("description", "default", "example", "nullable")


def problems(objects: list[Object], version: str) -> list[str]:
    """Everything that is wrong with a render, for one version of Kubernetes."""
    found = []
    for o in objects:
        name = f"{o['kind']}/{o['metadata']['name']}"
        check = _slim if _type(o) in SLIM else functools.partial(_built_in, version=version)
        found += [f"{name}: {text}" for text in check(o)]
    ray = [o for o in objects if o["kind"] == "RayCluster"]
    for name, pod in pods(ray):
        metadata = {"name": "pod", **pod["metadata"]}
        whole = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod["spec"]}
        found += [f"{name}: {text}" for text in _built_in(whole, version=version)]
    return found


def _type(o: Object) -> str:
    return f"{o['apiVersion']}/{o['kind']}"


def _built_in(o: Object, *, version: str) -> list[str]:
    group, _, rest = o["apiVersion"].rpartition("/")
    name = f"{o['kind'].lower()}-{group.split('.')[0]}{'-' if group else ''}{rest}.json"
    schema = _kubernetes_file(version, name)
    return [f"no schema of {_type(o)}"] if schema is None else _errors(_kubernetes(version, name), o)


@functools.cache
def _kubernetes(version: str, name: str) -> jsonschema.Draft202012Validator:
    """The package's own `validate` reads all definitions again for each object, which takes most of a test's time."""
    return jsonschema.Draft202012Validator(_kubernetes_file(version, name), registry=_definitions(version))


@functools.cache
def _definitions(version: str) -> Registry[Any]:
    return Resource.from_contents(_kubernetes_file(version, "_definitions.json")) @ Registry()


def _kubernetes_file(version: str, name: str) -> Any:
    base = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"
    (directory,) = base.glob(f"v{version}.*-local-strict")
    path = directory / name
    return json.loads(path.read_text()) if path.exists() else None


def _slim(o: Object) -> list[str]:
    properties = {**_ENVELOPE, "spec": SLIM[_type(o)]}
    schema = {"$defs": SLIM["$defs"], "type": "object", "additionalProperties": False, "properties": properties}
    return _errors(jsonschema.Draft202012Validator(schema), o)


def _errors(validator: jsonschema.Draft202012Validator, o: Object) -> list[str]:
    return [f"{'.'.join(map(str, e.absolute_path))}: {e.message[:200]}" for e in validator.iter_errors(o)]


def crd_problems(o: Object, version: str) -> list[str]:
    """What KubeRay's own definition of that version says of a RayCluster; unknown fields are errors."""
    return _errors(_crd(version), o)


@functools.cache
def _crd(version: str) -> jsonschema.Draft202012Validator:
    path = CRDS / f"rayclusters_v{version}.yaml"
    if not path.exists():
        pytest.skip(f"KubeRay's definitions are not part of the project, and {path} is not here")
    document = yaml.load(path.read_text(), yaml.CSafeLoader)
    (schema,) = [v["schema"]["openAPIV3Schema"] for v in document["spec"]["versions"] if v["name"] == "v1"]
    strict = strict_schema(schema)
    strict["properties"] |= _ENVELOPE
    return jsonschema.Draft202012Validator(strict)


def strict_schema(schema: Any) -> Any:
    """A structural schema of Kubernetes as JSON schema that takes no unknown fields, as `--validate=strict` does."""
    if not isinstance(schema, dict):
        return schema
    keep = schema.get("x-kubernetes-preserve-unknown-fields", False)
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "properties":
            result[key] = {name: strict_schema(part) for name, part in value.items()}
        elif key in ("items", "not", "additionalProperties"):
            result[key] = strict_schema(value)
        elif key in ("allOf", "anyOf", "oneOf"):
            result[key] = [strict_schema(part) for part in value]
        elif key not in _UNUSED and not key.startswith("x-") and not (key == "format" and value in _NUMBERS):
            result[key] = value
    if schema.get("x-kubernetes-int-or-string"):
        result.pop("anyOf", None)
        result["type"] = ["integer", "string"]
    if "properties" in result and not keep and result.get("type") == "object":
        result.setdefault("additionalProperties", False)
    return result
