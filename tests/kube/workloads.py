"""The controllers of Deployments, StatefulSets and Jobs: make and end pods as `rollout.py` decides, keep status."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from tests.kube.kinds import Document
from tests.kube.pods import (
    REVISION_LABEL,
    create_pod,
    facts_of,
    is_over,
    owned_pods,
    phase_of,
    pod_key,
    random_name,
    revision_of,
)
from tests.kube.rollout import Bounds, PodFacts, Step, deployment_step, recreate_step, stateful_step
from tests.kube.store import Key, Store, now_text

_APPS = "apps/v1"
_DEFAULT_SHARE = "25%"
_DEFAULT_BACKOFF_LIMIT = 6


def _key(document: Mapping[str, Any], plural: str) -> Key:
    metadata = document["metadata"]
    return Key(
        api=document["apiVersion"], plural=plural, namespace=metadata["namespace"], name=metadata["name"]
    )


def _living(store: Store, api: str, plural: str) -> list[Document]:
    return [found for found in store.list(api, plural) if "deletionTimestamp" not in found["metadata"]]


def _end(store: Store, namespace: str, step: Step) -> None:
    for name in step.end:
        store.delete(pod_key(namespace, name), graceful=True)


# --- Deployments


def reconcile_deployments(store: Store) -> None:
    """One step for each Deployment."""
    for deployment in _living(store, _APPS, "deployments"):
        _reconcile_deployment(store, deployment)


def _reconcile_deployment(store: Store, deployment: Document) -> None:
    spec, metadata = deployment["spec"], deployment["metadata"]
    replicas, revision = spec.get("replicas", 1), revision_of(spec["template"])
    pods = [pod for pod in owned_pods(store, deployment) if not is_over(pod)]
    facts = [facts_of(pod, min_ready_s=spec.get("minReadySeconds", 0)) for pod in pods]
    step = _deployment_step(spec, facts, replicas, revision)
    for _ in range(step.num_new):
        create_pod(
            store,
            deployment,
            random_name(f"{metadata['name']}-{revision}"),
            template=spec["template"],
            labels={REVISION_LABEL: revision},
        )
    _end(store, metadata["namespace"], step)
    store.set_status(_key(deployment, "deployments"), _deployment_status(deployment, facts, replicas, revision))


def _deployment_step(spec: Document, facts: list[PodFacts], replicas: int, revision: str) -> Step:
    strategy = spec.get("strategy", {})
    if strategy.get("type") == "Recreate":
        return recreate_step(facts, replicas=replicas, revision=revision)
    rolling = strategy.get("rollingUpdate") or {}
    bounds = Bounds.of(
        replicas, rolling.get("maxSurge", _DEFAULT_SHARE), rolling.get("maxUnavailable", _DEFAULT_SHARE)
    )
    return deployment_step(facts, replicas=replicas, revision=revision, bounds=bounds)


def _deployment_status(deployment: Document, facts: list[PodFacts], replicas: int, revision: str) -> Document:
    living = [pod for pod in facts if not pod.is_ending]
    num_available = sum(pod.is_available for pod in living)
    updated = [pod for pod in living if pod.revision == revision]
    is_done = sum(pod.is_available for pod in updated) == len(living) == replicas
    return {
        "observedGeneration": deployment["metadata"]["generation"],
        "replicas": len(living),
        "updatedReplicas": len(updated),
        "readyReplicas": num_available,
        "availableReplicas": num_available,
        "unavailableReplicas": max(0, replicas - num_available),
        "conditions": [
            _condition(deployment, "Available", num_available >= replicas, "MinimumReplicasAvailable"),
            _condition(
                deployment, "Progressing", True, "NewReplicaSetAvailable" if is_done else "ReplicaSetUpdated"
            ),
        ],
    }


def _condition(owner: Document, name: str, holds: bool, reason: str) -> Document:
    """A condition; the time of its last change stays while it does not change."""
    status = "True" if holds else "False"
    known = owner.get("status", {}).get("conditions", ())
    same = next((entry for entry in known if (entry["type"], entry["status"]) == (name, status)), None)
    since = same["lastTransitionTime"] if same else now_text()
    return {"type": name, "status": status, "reason": reason, "lastTransitionTime": since}


# --- StatefulSets


def reconcile_stateful_sets(store: Store) -> None:
    """One step for each StatefulSet."""
    for stateful in _living(store, _APPS, "statefulsets"):
        _reconcile_stateful(store, stateful)


def _reconcile_stateful(store: Store, stateful: Document) -> None:
    spec, metadata = stateful["spec"], stateful["metadata"]
    replicas, revision = spec.get("replicas", 1), revision_of(spec["template"])
    facts = [facts_of(pod, min_ready_s=spec.get("minReadySeconds", 0)) for pod in owned_pods(store, stateful)]
    strategy = spec.get("updateStrategy", {})
    is_rolling = strategy.get("type") != "OnDelete"
    partition = strategy.get("rollingUpdate", {}).get("partition", 0) if is_rolling else replicas
    step = stateful_step(
        facts,
        replicas=replicas,
        revision=revision,
        partition=partition,
        is_parallel=spec.get("podManagementPolicy") == "Parallel",
    )
    for ordinal in step.new_ordinals:
        _create_ordinal(store, stateful, ordinal, revision)
    _end(store, metadata["namespace"], step)
    store.set_status(_key(stateful, "statefulsets"), _stateful_status(stateful, facts, replicas, revision))


def _create_ordinal(store: Store, stateful: Document, ordinal: int, revision: str) -> None:
    spec, metadata = stateful["spec"], stateful["metadata"]
    name = f"{metadata['name']}-{ordinal}"
    claims = [_claim(store, stateful, template, name) for template in spec.get("volumeClaimTemplates", ())]
    template = deepcopy(spec["template"])
    template["spec"]["volumes"] = [*template["spec"].get("volumes", ()), *claims]
    labels = {
        REVISION_LABEL: revision,
        "statefulset.kubernetes.io/pod-name": name,
        "apps.kubernetes.io/pod-index": str(ordinal),
    }
    create_pod(
        store,
        stateful,
        name,
        template=template,
        labels=labels,
        hostname=name,
        subdomain=spec.get("serviceName", ""),
    )


def _claim(store: Store, stateful: Document, template: Document, pod: str) -> Document:
    """The volume of a pod's own claim, which outlives the pod."""
    name = f"{template['metadata']['name']}-{pod}"
    key = Key(api="v1", plural="persistentvolumeclaims", namespace=stateful["metadata"]["namespace"], name=name)
    if store.get(key) is None:
        claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "spec": template["spec"]}
        store.create(key, {**claim, "metadata": {"name": name, "labels": template["metadata"].get("labels", {})}})
    return {"name": template["metadata"]["name"], "persistentVolumeClaim": {"claimName": name}}


def _stateful_status(stateful: Document, facts: list[PodFacts], replicas: int, revision: str) -> Document:
    living = [pod for pod in facts if not pod.is_ending]
    updated = [pod for pod in living if pod.revision == revision]
    is_done = len(updated) == len(facts) == replicas and all(pod.is_available for pod in updated)
    current = stateful.get("status", {}).get("currentRevision", revision)
    num_available = sum(pod.is_available for pod in living)
    return {
        "observedGeneration": stateful["metadata"]["generation"],
        "replicas": len(living),
        "readyReplicas": num_available,
        "availableReplicas": num_available,
        "currentReplicas": len(living) if is_done else len(living) - len(updated),
        "updatedReplicas": len(updated),
        "currentRevision": revision if is_done else current,
        "updateRevision": revision,
    }


# --- Jobs


def reconcile_jobs(store: Store) -> None:
    """One step for each Job of one completion: a pod until one succeeds, or too many have failed."""
    for job in _living(store, "batch/v1", "jobs"):
        pods = owned_pods(store, job)
        num_failed = sum(phase_of(pod) == "Failed" for pod in pods)
        num_succeeded = sum(phase_of(pod) == "Succeeded" for pod in pods)
        num_active = len(pods) - num_failed - num_succeeded
        has_failed = num_failed > job["spec"].get("backoffLimit", _DEFAULT_BACKOFF_LIMIT)
        if not num_active and not num_succeeded and not has_failed:
            name = random_name(job["metadata"]["name"])
            labels = {"job-name": job["metadata"]["name"], "batch.kubernetes.io/job-name": job["metadata"]["name"]}
            create_pod(store, job, name, template=job["spec"]["template"], labels=labels)
            num_active = 1
        status = {
            "startTime": job["metadata"]["creationTimestamp"],
            "active": num_active,
            "failed": num_failed,
            "succeeded": num_succeeded,
            "ready": num_active,
        }
        ended = [("Complete", num_succeeded > 0, "CompletionsReached"), ("Failed", has_failed, "BackoffLimitExceeded")]
        conditions = [_condition(job, name, True, reason) for name, holds, reason in ended if holds]
        store.set_status(_key(job, "jobs"), {**status, "conditions": conditions})


