"""Which JSON Schemas can be held to: keywords that the grammar would silently leave out are refused by name. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tandem.errors import InvalidRequest

_UNHELD = (
    "not",
    "if",
    "contains",
    "minContains",
    "maxContains",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "$dynamicRef",
    "$recursiveRef",
)
"""Keywords that no grammar here expresses; `uniqueItems` and `allOf` only in some forms."""
_ONE = (
    "items",
    "additionalItems",
    "unevaluatedItems",
    "additionalProperties",
    "unevaluatedProperties",
    "propertyNames",
)
_MANY = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_MAX_DEPTH = 64


def check_schema(schema: Any, *, param: str) -> None:
    """Raises InvalidRequest for what is no schema, and for keywords that would not be held."""
    for path, part in _parts(schema, param, 0):
        if isinstance(part, bool):
            continue
        if not isinstance(part, dict):
            raise InvalidRequest(f"{path} must be a JSON Schema: an object, got {part!r:.80}", param=param)
        for keyword in _UNHELD:
            if keyword in part:
                raise InvalidRequest(f"{path}: the keyword {keyword!r} is not supported", param=param)
        if part.get("uniqueItems"):
            raise InvalidRequest(f"{path}: the keyword 'uniqueItems' is not supported", param=param)
        if isinstance(part.get("allOf"), list) and len(part["allOf"]) > 1:
            raise InvalidRequest(f"{path}: 'allOf' is supported with one member only", param=param)


def _parts(schema: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    """The schema and every schema in it. What is not where a schema belongs, such as an enum's value, is none."""
    if depth > _MAX_DEPTH:
        raise InvalidRequest(f"{path}: a JSON Schema nested deeper than {_MAX_DEPTH}", param=path.split(".", 1)[0])
    yield path, schema
    if not isinstance(schema, dict):
        return
    for key in _NAMED:
        members = schema.get(key)
        for name, member in members.items() if isinstance(members, dict) else ():
            yield from _parts(member, f"{path}.{key}.{name}", depth + 1)
    for key in _MANY:
        members = schema.get(key)
        for index, member in enumerate(members) if isinstance(members, list) else ():
            yield from _parts(member, f"{path}.{key}[{index}]", depth + 1)
    for key in _ONE:
        if key in schema and not isinstance(schema[key], list):
            yield from _parts(schema[key], f"{path}.{key}", depth + 1)
