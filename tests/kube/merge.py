"""How a write changes an object: JSON merge patch, and server-side apply with the fields that an applier let go."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from tests.kube.kinds import Document

_LIST_KEYS = ("mountPath", "containerPort", "name", "ip", "type", "uid")


def merge_patch(target: Any, patch: Any) -> Any:
    """RFC 7396: mappings are merged, null removes, everything else replaces. Neither argument is changed."""
    if not isinstance(patch, dict):
        return deepcopy(patch)
    merged = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge_patch(merged.get(key), value)
    return merged


def strategic_merge(target: Any, patch: Any) -> Any:
    """The same, but lists of named things are merged by name, and `$patch: delete` removes one."""
    if isinstance(patch, list) and (key := _list_key(patch)) is not None and isinstance(target, list):
        return _merge_lists(target, patch, key)
    if not isinstance(patch, dict):
        return deepcopy(patch)
    merged = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if name.startswith("$"):
            continue
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = strategic_merge(merged.get(name), value)
    return merged


def _list_key(items: list[Any]) -> str | None:
    return next((key for key in _LIST_KEYS if items and all(isinstance(i, dict) and key in i for i in items)), None)


def _merge_lists(target: list[Any], patch: list[Any], key: str) -> list[Any]:
    merged = {item.get(key): item for item in target}
    for item in patch:
        if item.get("$patch") == "delete":
            merged.pop(item[key], None)
        else:
            merged[item[key]] = strategic_merge(merged.get(item[key]), item)
    return list(merged.values())


def apply_configuration(live: Document, previous: Document, configuration: Document) -> Document:
    """The live object with an applier's new configuration in it, less what its previous one had and this one lacks.

    Lists are taken whole. What others have written beside it stays.
    """
    merged = dict(live)
    for key in previous.keys() - configuration.keys():
        rest = _without(merged.get(key), previous[key])
        if rest is None:
            merged.pop(key, None)
        else:
            merged[key] = rest
    for key, value in configuration.items():
        old, before = merged.get(key), previous.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            merged[key] = apply_configuration(old, before if isinstance(before, dict) else {}, value)
        else:
            merged[key] = deepcopy(value)
    return merged


def _without(live: Any, previous: Any) -> Any:
    """What is left of a field when its owner lets go of `previous`: None for nothing."""
    if not isinstance(live, dict) or not isinstance(previous, dict):
        return None
    rest = {
        key: value if key not in previous else _without(value, previous[key]) for key, value in live.items()
    }
    return {key: value for key, value in rest.items() if value is not None} or None
