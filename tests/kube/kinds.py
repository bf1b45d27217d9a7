"""Which kinds the API server knows, built in or by a CustomResourceDefinition, and its documents about them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Document = dict[str, Any]
"""A Kubernetes object, or any other JSON document of its API, as plain data."""

_VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]
_BUILT_IN = {
    "v1": "pods:Pod:po services:Service:svc secrets:Secret configmaps:ConfigMap:cm serviceaccounts:ServiceAccount:sa "
    "persistentvolumeclaims:PersistentVolumeClaim:pvc endpoints:Endpoints:ep events:Event namespaces:Namespace:ns "
    "nodes:Node:no",
    "apps/v1": "deployments:Deployment:deploy statefulsets:StatefulSet:sts replicasets:ReplicaSet:rs "
    "daemonsets:DaemonSet:ds",
    "batch/v1": "jobs:Job cronjobs:CronJob:cj",
    "policy/v1": "poddisruptionbudgets:PodDisruptionBudget:pdb",
    "autoscaling/v2": "horizontalpodautoscalers:HorizontalPodAutoscaler:hpa",
    "networking.k8s.io/v1": "networkpolicies:NetworkPolicy:netpol ingresses:Ingress:ing",
    "rbac.authorization.k8s.io/v1": "roles:Role rolebindings:RoleBinding",
    "scheduling.k8s.io/v1": "priorityclasses:PriorityClass:pc",
    "apiextensions.k8s.io/v1": "customresourcedefinitions:CustomResourceDefinition:crd",
}
_CLUSTER_WIDE = {"Namespace", "Node", "PriorityClass", "CustomResourceDefinition"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """One kind. `api` is "v1" or "group/version"; `schema` is there for kinds of custom resources."""

    api: str
    plural: str
    name: str
    namespaced: bool
    short_names: tuple[str, ...] = ()
    schema: Mapping[str, Any] | None = None

    @property
    def group(self) -> str:
        """The empty string for the core group."""
        return self.api.rpartition("/")[0]

    @property
    def version(self) -> str:
        """As in "v1"."""
        return self.api.rpartition("/")[2]


class Kinds:
    """The table; it grows with every CustomResourceDefinition."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, str], Kind] = {}
        for api, words in _BUILT_IN.items():
            for word in words.split():
                plural, name, *short = word.split(":")
                self._add(
                    Kind(
                        api=api,
                        plural=plural,
                        name=name,
                        namespaced=name not in _CLUSTER_WIDE,
                        short_names=tuple(short),
                    )
                )

    def _add(self, kind: Kind) -> None:
        self._kinds[kind.api, kind.plural] = kind

    def add_definition(self, definition: Mapping[str, Any]) -> None:
        """Every version of a CustomResourceDefinition."""
        spec = definition["spec"]
        for version in spec["versions"]:
            self._add(
                Kind(
                    api=f"{spec['group']}/{version['name']}",
                    plural=spec["names"]["plural"],
                    name=spec["names"]["kind"],
                    namespaced=spec["scope"] == "Namespaced",
                    short_names=tuple(spec["names"].get("shortNames", ())),
                    schema=version["schema"]["openAPIV3Schema"],
                )
            )

    def get(self, api: str, plural: str) -> Kind | None:
        """The kind at a path of the API."""
        return self._kinds.get((api, plural))

    def of(self, document: Mapping[str, Any]) -> Kind | None:
        """The kind that an object says it is."""
        wanted = (document["apiVersion"], document["kind"])
        return next((kind for kind in self._kinds.values() if (kind.api, kind.name) == wanted), None)

    def in_api(self, api: str) -> Iterator[Kind]:
        """All kinds of a group and version."""
        return (kind for kind in self._kinds.values() if kind.api == api)

    @property
    def apis(self) -> list[str]:
        """Every group and version, core first."""
        return list(dict.fromkeys(kind.api for kind in self._kinds.values()))


def group_list(kinds: Kinds) -> Document:
    """What GET /apis says."""
    groups: dict[str, list[Document]] = {}
    for api in kinds.apis:
        group, _, version = api.rpartition("/")
        if group:
            groups.setdefault(group, []).append({"groupVersion": api, "version": version})
    named = [{"name": name, "versions": found, "preferredVersion": found[0]} for name, found in groups.items()]
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": named}


def resource_list(kinds: Kinds, api: str) -> Document:
    """What GET /apis/GROUP/VERSION says."""
    resources = [
        {
            "name": kind.plural,
            "singularName": kind.name.lower(),
            "shortNames": list(kind.short_names),
            "namespaced": kind.namespaced,
            "kind": kind.name,
            "verbs": _VERBS,
        }
        for kind in kinds.in_api(api)
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": api, "resources": resources}


def openapi_index(kinds: Kinds) -> Document:
    """Where the OpenAPI document of each group and version is."""
    roots = {api: f"apis/{api}" if "/" in api else f"api/{api}" for api in kinds.apis}
    return {"paths": {root: {"serverRelativeURL": f"/openapi/v3/{root}"} for root in roots.values()}}


def openapi_document(kinds: Kinds, api: str) -> Document:
    """As much of it as clients need to see that a kind can be applied, and its fields validated, on the server."""
    parameter = {"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}
    paths = {}
    for kind in kinds.in_api(api):
        scope = "namespaces/{namespace}/" if kind.namespaced else ""
        root = f"/apis/{api}" if kind.group else f"/api/{api}"
        paths[f"{root}/{scope}{kind.plural}/{{name}}"] = {
            "patch": {
                "parameters": [parameter],
                "responses": {},
                "x-kubernetes-action": "patch",
                "x-kubernetes-group-version-kind": {"group": kind.group, "version": kind.version, "kind": kind.name},
            }
        }
    info = {"title": "stand-in", "version": "1"}
    return {"openapi": "3.0.0", "info": info, "paths": paths, "components": {"schemas": {}}}
