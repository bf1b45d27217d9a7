"""Pods as objects: made from a template for an owner, and what their status says."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from copy import deepcopy
from datetime import UTC, datetime
from typing import Any

from tests.kube.kinds import Document
from tests.kube.rollout import PodFacts
from tests.kube.store import Key, Store

POD_API, PODS = "v1", "pods"
REVISION_LABEL = "pod-template-hash"
_SUFFIX = "bcdfghjklmnpqrstvwxz2456789"


def pod_key(namespace: str, name: str) -> Key:
    """Where a pod is."""
    return Key(api=POD_API, plural=PODS, namespace=namespace, name=name)


def key_of(pod: Mapping[str, Any]) -> Key:
    """The same, of a pod."""
    return pod_key(pod["metadata"]["namespace"], pod["metadata"]["name"])


def revision_of(template: Mapping[str, Any]) -> str:
    """Ten letters that differ when the template does."""
    digest = hashlib.blake2b(json.dumps(template, sort_keys=True).encode(), digest_size=5)
    return digest.hexdigest()


def random_name(prefix: str) -> str:
    """A name that is not taken."""
    return f"{prefix}-{''.join(random.choices(_SUFFIX, k=5))}"


def owned_pods(store: Store, owner: Mapping[str, Any]) -> list[Document]:
    """The pods of an owner, oldest first."""
    return [
        pod for pod in store.list(POD_API, PODS, owner["metadata"]["namespace"]) if is_owned_by(pod, owner)
    ]


def is_owned_by(document: Mapping[str, Any], owner: Mapping[str, Any]) -> bool:
    """Whether `owner` is among an object's owners."""
    references = document["metadata"].get("ownerReferences", ())
    return any(reference["uid"] == owner["metadata"]["uid"] for reference in references)


def create_pod(
    store: Store,
    owner: Mapping[str, Any],
    name: str,
    *,
    template: Mapping[str, Any],
    labels: Mapping[str, str],
    **spec: Any,
) -> None:
    """Makes a pod from a template, with more labels, and fields of its spec that the owner decides."""
    pod: Document = {"apiVersion": "v1", "kind": "Pod", **deepcopy(dict(template))}
    metadata = pod.setdefault("metadata", {})
    metadata |= {"name": name, "ownerReferences": [reference(owner)]}
    metadata["labels"] = {**metadata.get("labels", {}), **labels}
    pod["spec"] |= spec
    store.create(pod_key(owner["metadata"]["namespace"], name), pod)


def reference(owner: Mapping[str, Any]) -> Document:
    """An owner, as its objects name it."""
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def condition(document: Mapping[str, Any], name: str) -> Document | None:
    """One of the conditions in an object's status."""
    found = document.get("status", {}).get("conditions", ())
    return next((entry for entry in found if entry["type"] == name), None)


def is_ready(pod: Mapping[str, Any]) -> bool:
    """Whether all its containers are ready."""
    ready = condition(pod, "Ready")
    return ready is not None and ready["status"] == "True"


def is_ending(pod: Mapping[str, Any]) -> bool:
    """Whether it was asked to end."""
    return "deletionTimestamp" in pod["metadata"]


def is_over(pod: Mapping[str, Any]) -> bool:
    """Whether all its containers have ended for good."""
    return phase_of(pod) in ("Succeeded", "Failed")


def phase_of(pod: Mapping[str, Any]) -> str:
    """Pending until the kubelet says otherwise."""
    return str(pod.get("status", {}).get("phase", "Pending"))


def is_available(pod: Mapping[str, Any], min_ready_s: float) -> bool:
    """Whether it has been ready for so long."""
    ready = condition(pod, "Ready")
    if ready is None or ready["status"] != "True":
        return False
    since = datetime.fromisoformat(ready["lastTransitionTime"])
    return (datetime.now(UTC) - since).total_seconds() >= min_ready_s


def facts_of(pod: Mapping[str, Any], *, min_ready_s: float = 0.0) -> PodFacts:
    """What a rollout needs to know of it."""
    name = pod["metadata"]["name"]
    ordinal = name.rpartition("-")[2]
    return PodFacts(
        name=name,
        revision=pod["metadata"]["labels"].get(REVISION_LABEL, ""),
        is_available=is_available(pod, min_ready_s) and not is_ending(pod),
        is_ending=is_ending(pod),
        ordinal=int(ordinal) if ordinal.isdigit() else 0,
    )
