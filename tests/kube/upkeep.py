"""What the control plane does besides: takes away what has lost its owner, binds claims, counts for budgets."""

from __future__ import annotations

from tests.kube.kinds import Document
from tests.kube.pods import POD_API, PODS, is_ending, is_ready
from tests.kube.rollout import Bounds
from tests.kube.selection import labels_of, matches_labels
from tests.kube.store import FOREGROUND, Key, Store

_OWNED = ((POD_API, PODS), ("batch/v1", "jobs"), ("v1", "services"), ("v1", "endpoints"))
_OWNERS = ("apps/v1 deployments", "apps/v1 statefulsets", "batch/v1 jobs", "ray.io/v1 rayclusters")


def collect_garbage(store: Store) -> None:
    """Ends what belongs to an owner that is gone, and lets go owners that waited for what they own."""
    owners = [owner for words in _OWNERS for owner in store.list(*words.split())]
    alive = {owner["metadata"]["uid"] for owner in owners if not is_ending(owner)}
    alive |= {service["metadata"]["uid"] for service in store.list("v1", "services")}
    still_owning: set[str] = set()
    for api, plural in _OWNED:
        for found in store.list(api, plural):
            uids = {reference["uid"] for reference in found["metadata"].get("ownerReferences", ())}
            still_owning |= uids
            if uids and not uids & alive and not is_ending(found):
                store.delete(_key(found, api, plural), graceful=plural == PODS)
    for owner in owners:
        is_waiting = FOREGROUND in owner["metadata"].get("finalizers", ())
        if is_waiting and owner["metadata"]["uid"] not in still_owning:
            store.remove(_key(owner, owner["apiVersion"], _plural(store, owner)))


def _plural(store: Store, document: Document) -> str:
    kind = store.kinds.of(document)
    assert kind is not None
    return kind.plural


def _key(document: Document, api: str, plural: str) -> Key:
    metadata = document["metadata"]
    return Key(api=api, plural=plural, namespace=metadata.get("namespace", ""), name=metadata["name"])


def bind_claims(store: Store) -> None:
    """Every claim gets a volume."""
    for claim in store.list("v1", "persistentvolumeclaims"):
        store.set_status(_key(claim, "v1", "persistentvolumeclaims"), {"phase": "Bound"})


def count_for_budgets(store: Store) -> None:
    """The status of every PodDisruptionBudget."""
    for budget in store.list("policy/v1", "poddisruptionbudgets"):
        namespace, spec = budget["metadata"]["namespace"], budget["spec"]
        pods = [pod for pod in store.list(POD_API, PODS, namespace) if matches_labels(spec["selector"], labels_of(pod))]
        num_healthy = sum(is_ready(pod) and not is_ending(pod) for pod in pods)
        if "minAvailable" in spec:
            num_wanted = Bounds.of(len(pods), spec["minAvailable"], 0).max_surge
        else:
            num_wanted = len(pods) - Bounds.of(len(pods), spec.get("maxUnavailable", 0), 0).max_surge
        num_allowed = max(0, num_healthy - num_wanted)
        status = {
            "observedGeneration": budget["metadata"]["generation"],
            "currentHealthy": num_healthy,
            "desiredHealthy": num_wanted,
            "expectedPods": len(pods),
            "disruptionsAllowed": num_allowed,
        }
        store.set_status(_key(budget, "policy/v1", "poddisruptionbudgets"), status)
