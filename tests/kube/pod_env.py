"""A container's environment as its spec says, and the expansion of $(NAME) in it, in commands and in arguments."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.kube.kinds import Document
from tests.kube.store import Key, Store

NODE_NAME = "stand-in"
NODE_IP = "127.0.0.1"
_REFERENCE = re.compile(r"\$(\$|\((?P<name>[\w.-]+)\))")
_SUBSCRIPT = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")
_SUFFIXES = {"": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12} | {
    f"{letter}i": 1024.0 ** (power + 1) for power, letter in enumerate("KMGT")
}


class NotThere(Exception):
    """Something that a pod refers to does not exist (yet)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lookup:
    """What `valueFrom` may refer to."""

    store: Store
    pod: Document
    pod_ip: str

    def data(self, plural: str, name: str) -> dict[str, bytes]:
        """The contents of a ConfigMap or Secret, by key. Raises NotThere."""
        key = Key(api="v1", plural=plural, namespace=self.pod["metadata"]["namespace"], name=name)
        document = self.store.get(key)
        if document is None:
            raise NotThere(f"{plural[:-1]} {name!r} not found")
        return contents(document)

    def field(self, path: str) -> str:
        """A field of the pod, as the downward API names it. Raises NotThere for one that it does not have."""
        if subscript := _SUBSCRIPT.fullmatch(path):
            return str(self.pod["metadata"].get(subscript[1], {}).get(subscript[2], ""))
        known = {
            "metadata.name": self.pod["metadata"]["name"],
            "metadata.namespace": self.pod["metadata"]["namespace"],
            "metadata.uid": self.pod["metadata"]["uid"],
            "spec.nodeName": NODE_NAME,
            "spec.serviceAccountName": self.pod["spec"].get("serviceAccountName", "default"),
            "status.podIP": self.pod_ip,
            "status.podIPs": self.pod_ip,
            "status.hostIP": NODE_IP,
        }
        if path not in known:
            raise NotThere(f"no field {path!r} of a pod")
        return str(known[path])


def contents(document: Mapping[str, Any]) -> dict[str, bytes]:
    """What a ConfigMap or a Secret holds, by key."""
    is_secret = document["kind"] == "Secret"
    found = {
        key: base64.b64decode(value) if is_secret else str(value).encode()
        for key, value in (document.get("data") or {}).items()
    }
    found |= {key: str(value).encode() for key, value in (document.get("stringData") or {}).items()}
    return found | {key: base64.b64decode(value) for key, value in (document.get("binaryData") or {}).items()}


def environment(container: Mapping[str, Any], lookup: Lookup) -> dict[str, str]:
    """What a container's `envFrom` and `env` give, in order. Raises NotThere."""
    found: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        found |= _whole(source, lookup)
    for entry in container.get("env", ()):
        if "value" in entry:
            found[entry["name"]] = expand(entry["value"], found)
        elif (value := _value_from(entry, container, lookup)) is not None:
            found[entry["name"]] = value
    return found


def _whole(source: Mapping[str, Any], lookup: Lookup) -> dict[str, str]:
    reference, plural = (
        (source["secretRef"], "secrets") if "secretRef" in source else (source["configMapRef"], "configmaps")
    )
    try:
        data = lookup.data(plural, reference["name"])
    except NotThere:
        if reference.get("optional"):
            return {}
        raise
    return {source.get("prefix", "") + key: value.decode() for key, value in data.items()}


def _value_from(entry: Mapping[str, Any], container: Mapping[str, Any], lookup: Lookup) -> str | None:
    source = entry.get("valueFrom", {})
    if "fieldRef" in source:
        return lookup.field(source["fieldRef"]["fieldPath"])
    if "resourceFieldRef" in source:
        return resource_value(container, source["resourceFieldRef"])
    for field, plural in (("secretKeyRef", "secrets"), ("configMapKeyRef", "configmaps")):
        if field in source:
            return _key_of(source[field], plural, lookup)
    return ""


def _key_of(reference: Mapping[str, Any], plural: str, lookup: Lookup) -> str | None:
    try:
        data = lookup.data(plural, reference["name"])
        if reference["key"] not in data:
            raise NotThere(f"{plural[:-1]} {reference['name']!r} has no key {reference['key']!r}")
    except NotThere:
        if reference.get("optional"):
            return None
        raise
    return data[reference["key"]].decode()


def resource_value(container: Mapping[str, Any], reference: Mapping[str, Any]) -> str:
    """A limit or request of the container in units of the divisor, rounded up; 1 CPU or 1 GiB where none is set."""
    kind, _, name = reference["resource"].partition(".")
    text = container.get("resources", {}).get(kind, {}).get(name, "1" if name == "cpu" else "1Gi")
    divisor = quantity(str(reference.get("divisor", "1")) if str(reference.get("divisor", "0")) != "0" else "1")
    return str(-int(-quantity(str(text)) // divisor))


def quantity(text: str) -> float:
    """A Kubernetes quantity as a number. Raises ValueError."""
    match = re.fullmatch(r"([\d.]+)([a-zA-Z]*)", text)
    if match is None or match[2] not in _SUFFIXES:
        raise ValueError(f"not a quantity: {text!r}")
    return float(match[1]) * _SUFFIXES[match[2]]


def expand(text: str, values: Mapping[str, str]) -> str:
    """$(NAME) replaced where NAME is known, $$ by $; everything else stays as it is written."""

    def replaced(match: re.Match[str]) -> str:
        return "$" if match[1] == "$" else values.get(match["name"], match[0])

    return _REFERENCE.sub(replaced, text)
