"""Why no node takes a worker: what it asks for beside what the nodes have, and what of that is free. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.placement import RESOURCE, Selector

_ONE_OF = re.compile(r"(!?)in\((.*)\)")
_NAMES = {resource: f"{role} slots" for role, resource in RESOURCE.items()} | {
    "GPU": "GPUs",
    "CPU": "CPUs",
    "memory": "bytes of memory",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRoom:
    """A living node: its resources by Ray's names, what of them nobody has, and its labels."""

    resources: Mapping[str, float]
    free: Mapping[str, float]
    labels: Mapping[str, str]


def why_no_room(bundles: Sequence[Mapping[str, float]], selector: Selector, nodes: Sequence[NodeRoom]) -> str:
    """For people; empty where a node has room for all bundles together, so that the worker will be placed at once."""
    asked: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            asked[name] = asked.get(name, 0.0) + amount
    allowed = [node for node in nodes if _selects(selector, node.labels)]
    if not allowed:
        return f"no node has the labels {_shown(selector)}" if nodes else "there is no node"
    able = [node for node in allowed if _holds(node.resources, asked)]
    among = f" with the labels {_shown(selector)}" if selector.labels else ""
    if not able:
        return _too_small(asked, allowed, among)
    if any(_holds(node.free, asked) for node in able):
        return ""
    used = [name for name, amount in asked.items() if all(node.free.get(name, 0.0) < amount for node in able)]
    return f"too few free {' and '.join(_name(name) for name in used or asked)} on the nodes{among}"


def _too_small(asked: Mapping[str, float], nodes: Sequence[NodeRoom], among: str) -> str:
    for name, amount in asked.items():
        most = max(node.resources.get(name, 0.0) for node in nodes)
        if most < amount:
            return f"it needs {_amount(name, amount)} on one node, none{among} has more than {most:g}"
    what = " and ".join(_amount(name, amount) for name, amount in asked.items())
    return f"no node{among} has {what} together"


def _holds(has: Mapping[str, float], asked: Mapping[str, float]) -> bool:
    return all(has.get(name, 0.0) >= amount for name, amount in asked.items())


def _amount(resource: str, amount: float) -> str:
    name = _name(resource)
    return f"1 {name.removesuffix('s')}" if amount == 1 else f"{amount:g} {name}"


def _name(resource: str) -> str:
    return _NAMES.get(resource, resource)


def _shown(selector: Selector) -> str:
    return ", ".join(f"{label}={condition}" for label, condition in selector.labels)


def _selects(selector: Selector, labels: Mapping[str, str]) -> bool:
    return all(_meets(labels.get(label), condition) for label, condition in selector.labels)


def _meets(value: str | None, condition: str) -> bool:
    """A condition in Ray's words: "a", "!a", "in(a,b)", "!in(a,b)"."""
    match = _ONE_OF.fullmatch(condition)
    excludes = condition.startswith("!")
    listed = [each.strip() for each in match[2].split(",")] if match else [condition.removeprefix("!")]
    return (value in listed) is not excludes
