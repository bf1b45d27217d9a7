"""Whether an object is valid, as strictly as `kubectl --validate=strict`: unknown fields are errors.

Built-in kinds are held against the schemas of the `kubernetes-validate` package, custom resources against the
structural schema of their definition.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import jsonschema
from kubernetes_validate import utils
from referencing import Registry, Resource

from tests.kube.kinds import Document, Kind

KUBERNETES_VERSION = "1.33"
_LONGEST_MESSAGE = 200
_MOST_PROBLEMS = 5
_NUMBER_FORMATS = {"int32", "int64", "double", "float"}
_DROPPED = {"description", "default", "example", "nullable"}
_OF_ONE = {"items", "not", "additionalProperties"}
_OF_MANY = {"allOf", "anyOf", "oneOf"}


def problems(kind: Kind, document: Mapping[str, Any]) -> list[str]:
    """What is wrong with an object, as "path: message"; empty when it is valid. Its status is not looked at."""
    checked = {"apiVersion": kind.api, "kind": kind.name}
    checked |= {key: value for key, value in document.items() if key != "status"}
    validator = _built_in(kind.api, kind.name) if kind.schema is None else _custom(kind)
    errors = sorted(validator.iter_errors(checked), key=lambda error: list(map(str, error.absolute_path)))
    return [_sentence(error) for error in errors[:_MOST_PROBLEMS]]


def _sentence(error: jsonschema.ValidationError) -> str:
    return f"{'.'.join(map(str, error.absolute_path))}: {error.message[:_LONGEST_MESSAGE]}"


@cache
def _directory() -> str:
    return f"kubernetes-json-schema/v{_exact_version()}-local-strict"


@cache
def _exact_version() -> str:
    return next(found for found in utils.all_versions() if utils.major_minor(found) == KUBERNETES_VERSION)


@cache
def _definitions() -> Registry[Any]:
    contents = utils.schema_contents(f"{_directory()}/_definitions.json", KUBERNETES_VERSION)
    registry: Registry[Any] = Resource.from_contents(contents) @ Registry()
    return registry


@cache
def _built_in(api: str, name: str) -> jsonschema.protocols.Validator:
    group, _, version = api.rpartition("/")
    word = f"{group.split('.')[0]}-{version}" if group else version
    schema = utils.schema_contents(f"{_directory()}/{name.lower()}-{word}.json", KUBERNETES_VERSION)
    return jsonschema.Draft202012Validator(schema, registry=Resource.from_contents(schema) @ _definitions())


_custom_validators: dict[int, jsonschema.protocols.Validator] = {}


def _custom(kind: Kind) -> jsonschema.protocols.Validator:
    assert kind.schema is not None
    if id(kind.schema) not in _custom_validators:
        schema = plain_schema(kind.schema)
        schema["properties"] |= {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
        }
        _custom_validators[id(kind.schema)] = jsonschema.Draft202012Validator(schema)
    return _custom_validators[id(kind.schema)]


def plain_schema(structural: Any) -> Any:
    """A structural schema as JSON Schema: objects with known properties take no others, unless it says that they do."""
    if not isinstance(structural, Mapping):
        return structural
    plain: Document = {}
    for key, value in structural.items():
        if key.startswith("x-") or key in _DROPPED or (key == "format" and value in _NUMBER_FORMATS):
            continue
        plain[key] = _plain_part(key, value)
    if structural.get("x-kubernetes-int-or-string"):
        plain.pop("anyOf", None)
        plain["type"] = ["integer", "string"]
    if structural.get("nullable") and isinstance(plain.get("type"), str):
        plain["type"] = [plain["type"], "null"]
    return _closed(plain, structural)


def _plain_part(key: str, value: Any) -> Any:
    if key == "properties":
        return {name: plain_schema(part) for name, part in value.items()}
    if key in _OF_ONE:
        return plain_schema(value)
    return [plain_schema(part) for part in value] if key in _OF_MANY else value


def _closed(plain: Document, structural: Mapping[str, Any]) -> Document:
    is_open = structural.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in plain
    if "properties" in plain and not is_open and "object" in (plain.get("type"), *_listed(plain.get("type"))):
        plain["additionalProperties"] = False
        if structural.get("x-kubernetes-embedded-resource"):
            for name in ("apiVersion", "kind", "metadata"):
                plain["properties"].setdefault(name, {})
    return plain


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
