"""Label and field selectors, as in a list call and as in a workload's or a Service's spec."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tests.kube.kinds import Document

_TERM = re.compile(
    r"\s*(?:(?P<absent>!)(?P<gone>[\w./-]+)"
    r"|(?P<key>[\w./-]+)\s*(?:(?P<op>==|=|!=)\s*(?P<value>[\w.-]*)|(?P<set>in|notin)\s*\((?P<values>[^)]*)\))?)\s*"
)


def labels_of(document: Mapping[str, Any]) -> Mapping[str, str]:
    """An object's labels."""
    labels: Mapping[str, str] = document["metadata"].get("labels") or {}
    return labels


def matches_query(selector: str, labels: Mapping[str, str]) -> bool:
    """Whether labels match a selector as a query has it. Raises ValueError for one that cannot be read."""
    at = 0
    while at < len(selector):
        term = _TERM.match(selector, at)
        if term is None or selector[term.end() : term.end() + 1] not in ("", ","):
            raise ValueError(f"unreadable label selector {selector!r}")
        if not _holds(term, labels):
            return False
        at = term.end() + 1  # the comma
    return True


def _holds(term: re.Match[str], labels: Mapping[str, str]) -> bool:
    if term["absent"]:
        return term["gone"] not in labels
    value = labels.get(term["key"])
    if term["set"]:
        return (value in {word.strip() for word in term["values"].split(",")}) == (term["set"] == "in")
    if term["op"] is None:
        return value is not None
    return (value == term["value"]) == (term["op"] != "!=")


def matches_labels(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether labels match a workload's `selector`."""
    wanted = selector.get("matchLabels", {})
    return all(labels.get(key) == value for key, value in wanted.items()) and all(
        _fulfils(expression, labels) for expression in selector.get("matchExpressions", ())
    )


def _fulfils(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    value, operator = labels.get(expression["key"]), expression["operator"]
    if operator in ("Exists", "DoesNotExist"):
        return (value is not None) == (operator == "Exists")
    return (value in expression["values"]) == (operator == "In")


def matches_fields(selector: str, document: Document) -> bool:
    """Whether an object matches a field selector: equality of fields by their path."""
    for term in filter(None, selector.split(",")):
        path, operator, value = re.split(r"(!=|==|=)", term, maxsplit=1)
        found: Any = document
        for name in path.split("."):
            found = found.get(name) if isinstance(found, dict) else None
        if (str(found or "") == value) == (operator == "!="):
            return False
    return True
