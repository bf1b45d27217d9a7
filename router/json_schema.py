"""Which JSON Schemas can be held to: keywords that the grammar would silently leave out are refused by name. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    "multipleOf",
)
"""Keywords that no grammar here expresses; `uniqueItems` and `allOf` only in some forms."""
_TYPES: dict[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: _is_number(value) and value == int(value),
    "number": lambda value: _is_number(value),
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}
_ALONE = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const", "pattern")
"""Where one of these stands, the grammar holds to it and to no other keyword that limits the same value."""
_LIMITS = frozenset(
    [
        *_ALONE,
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "format"),
        *("items", "prefixItems", "additionalItems", "unevaluatedItems", "minItems", "maxItems", "required"),
        *("properties", "patternProperties", "propertyNames", "additionalProperties", "unevaluatedProperties"),
        *("minProperties", "maxProperties"),
    ]
)
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
        problem = _problem(part)
        if problem is not None:
            raise InvalidRequest(f"{path}: {problem}", param=param)


def _problem(part: dict[str, Any]) -> str | None:
    """Why the keywords of this schema cannot all be held, or are none."""
    return _bad_form(part) or _bad_company(part) or _bad_values(part)


def _bad_form(part: dict[str, Any]) -> str | None:
    kinds = part.get("type", "null")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if not kinds or not all(isinstance(kind, str) and kind in _TYPES for kind in kinds):
        return f"'type' must be one or several of {', '.join(_TYPES)}, got {part['type']!r:.80}"
    for key in ("anyOf", "oneOf", "allOf", "enum"):
        if key in part and not (isinstance(part[key], list) and part[key]):
            return f"{key!r} must be a list that is not empty"
    required = part.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        return "'required' must be a list of names"
    reference = part.get("$ref", "#")
    if not isinstance(reference, str) or not reference.startswith("#"):
        return "'$ref' is supported within the schema only, as in '#/$defs/name'"
    properties = part.get("properties", {})
    unknown = [name for name in required if not isinstance(properties, dict) or name not in properties]
    return f"'required' names {unknown[0]!r}, which must be one of 'properties'" if unknown else None


def _bad_company(part: dict[str, Any]) -> str | None:
    for key in _ALONE:
        if key in part:
            others = sorted(_LIMITS & part.keys() - {key})
            if others:
                return f"{key!r} is supported without {', '.join(map(repr, others))} beside it"
    members = [m for key in ("anyOf", "oneOf", "allOf") for m in part.get(key, ())]
    if "type" in part and "$ref" in part:
        return "'$ref' is supported without 'type' beside it"
    if "type" in part and not all(isinstance(m, dict) and m.get("type") == part["type"] for m in members):
        return "a 'type' beside 'anyOf', 'oneOf' or 'allOf' must be that of each member"
    return None


def _bad_values(part: dict[str, Any]) -> str | None:
    values = part.get("enum", [part["const"]] if "const" in part else [])
    kinds = part.get("type", list(_TYPES))
    kinds = kinds if isinstance(kinds, list) else [kinds]
    for value in values:
        if not any(_TYPES[kind](value) for kind in kinds):
            return f"{value!r:.80} is not of the type {part['type']!r}"
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_object_schema(schema: Any, *, param: str) -> None:
    """As `check_schema`, for a schema that must describe an object, as a tool's parameters do."""
    check_schema(schema, param=param)
    part, reference = schema, schema.get("$ref", "")
    if reference.startswith("#/"):
        for name in reference[2:].split("/"):
            part = part.get(name.replace("~1", "/").replace("~0", "~"), {}) if isinstance(part, dict) else {}
    if not isinstance(part, dict) or part.get("type") != "object":
        raise InvalidRequest(f"{param} must be a JSON Schema of the type 'object'", param=param)


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
