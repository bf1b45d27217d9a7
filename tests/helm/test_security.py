"""What the restricted pod security standard asks of pods, least rights, and secrets that stay where they belong."""

from __future__ import annotations

import base64
import re
from typing import Any

import pytest

from tests.helm.chart import Object, containers, find, kinds, pods, preset, render, worker_pod
from tests.helm.test_valid import CASES

ALLOWED_VOLUMES = {"configMap", "secret", "emptyDir", "persistentVolumeClaim", "ephemeral", "downwardAPI", "projected"}


@pytest.mark.parametrize("name", ["one-node-cpu", "production", "keda"])
def test_pods_keep_the_restricted_standard(name: str) -> None:
    for where, pod in pods(render(CASES[name])):
        assert restricted_problems(pod) == [], where


def restricted_problems(pod: Object) -> list[str]:
    """What the standard forbids. (https://kubernetes.io/docs/concepts/security/pod-security-standards/)"""
    spec = pod["spec"]
    security = spec["securityContext"]
    found = [] if security["runAsNonRoot"] and security["runAsUser"] > 0 else ["runs as root"]
    found += [] if security["seccompProfile"]["type"] == "RuntimeDefault" else ["has no seccomp profile"]
    found += [f"sets {key}" for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)]
    found += [f"has a volume {v}" for v in spec["volumes"] if not (set(v) - {"name"}) <= ALLOWED_VOLUMES]
    for container in containers(pod):
        own = container["securityContext"]
        is_least = own["capabilities"] == {"drop": ["ALL"]} and own["allowPrivilegeEscalation"] is False
        found += [] if is_least else [f"{container['name']} keeps capabilities or may gain them"]
    return found


def test_root_and_host_paths_are_found() -> None:
    rdma = {"rdma": {"enabled": True, "runAsRoot": True}, "model": {"volume": {"type": "hostPath", "path": "/m"}}}
    assert len(restricted_problems(worker_pod(render(rdma), "node"))) == 3


@pytest.mark.parametrize("name", CASES)
def test_root_file_systems_are_read_only_and_tmp_is_a_volume(name: str) -> None:
    for where, pod in pods(render(CASES[name])):
        for container in containers(pod):
            if container["name"] == "first":
                continue  # the user's own
            assert container["securityContext"]["readOnlyRootFilesystem"], where
            if container["name"] != "valkey":
                assert "/tmp" in [mount["mountPath"] for mount in container["volumeMounts"]], where


@pytest.mark.parametrize("name", CASES)
def test_only_ray_s_autoscaler_gets_a_token_of_the_api_server(name: str) -> None:
    objects = render(CASES[name])
    ray = CASES[name].get("autoscaling", {}).get("mode") == "ray"
    with_token = [where for where, pod in pods(objects) if pod["spec"]["automountServiceAccountToken"]]
    assert with_token == (["RayCluster/demo-tandem-ray/head"] if ray else [])
    assert not kinds(objects, "Role") + kinds(objects, "ClusterRole") + kinds(objects, "RoleBinding")


@pytest.mark.parametrize("name", CASES)
def test_every_container_says_what_it_needs_and_may_use(name: str) -> None:
    for where, pod in pods(render(CASES[name])):
        for container in containers(pod):
            if container["name"] == "first":
                continue
            resources = container["resources"]
            assert {"cpu", "memory"} <= set(resources["requests"]), where
            assert "memory" in resources["limits"], where


@pytest.mark.parametrize("name", CASES)
def test_images_are_pinned(name: str) -> None:
    for _, pod in pods(render(CASES[name])):
        for container in containers(pod):
            assert re.search(r":\d+\.\d+|@sha256:[0-9a-f]{64}$", container["image"])


def test_redis_s_password_is_in_no_command_line_and_no_config_map() -> None:
    objects = render({"valkey": {"password": "c0rrect-horse"}, "kuberay": {"enabled": True}})
    for o in objects:
        if o["kind"] != "Secret":
            assert "c0rrect-horse" not in str(o)
    for where, pod in pods(objects):
        for container in containers(pod):
            words = [*container.get("command", []), *container.get("args", [])]
            assert not any("PASSWORD" in word for word in words), where


def test_tls_and_keys_reach_the_router_and_its_test_alone() -> None:
    objects = render(preset("production"))
    holders: dict[str, set[str]] = {"tandem-tls": set(), "tandem-api-keys": set()}
    for where, pod in pods(objects):
        for volume in pod["spec"]["volumes"]:
            secret = volume.get("secret", {}).get("secretName")
            if secret in holders:
                holders[secret].add(where)
    assert set.union(*holders.values()) == {"Deployment/demo-tandem-router", "Pod/demo-tandem-test-connection"}


def test_the_server_s_key_is_not_given_to_the_test() -> None:
    pod = find(render(preset("production")), "Pod")
    (tls,) = [v["secret"] for v in pod["spec"]["volumes"] if v["name"] == "tls"]
    assert tls["items"] == [{"key": "ca.crt", "path": "ca.crt"}]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"serviceAccounts": {"create": False, "name": "shared"}}, {"shared"}),
        ({}, {"demo-tandem-router", "demo-tandem-head", "demo-tandem-worker", "demo-tandem-valkey"}),
    ],
)
def test_each_kind_of_pod_has_its_account_or_all_the_given_one(values: dict[str, Any], expected: set[str]) -> None:
    accounts = {pod["spec"].get("serviceAccountName") for _, pod in pods(render(values))}
    assert accounts - {None} == expected


def test_pull_secrets_reach_every_pod() -> None:
    for where, pod in pods(render({"image": {"pullSecrets": ["registry"]}})):
        assert pod["spec"]["imagePullSecrets"] == [{"name": "registry"}], where


def test_every_process_gets_the_clusters_key_and_it_is_in_no_config_map() -> None:
    for extra in ({}, {"kuberay": {"enabled": True}}):
        objects = render(extra, {"auth": {"clusterKey": "ab" * 32}})
        held = [secret for secret in kinds(objects, "Secret") if secret["metadata"]["name"].endswith("cluster-key")]
        assert [base64.b64decode(secret["data"]["key"]).decode() for secret in held] == ["ab" * 32]
        assert "ab" * 32 not in str(kinds(objects, "ConfigMap"))
        for _, pod in pods(objects):
            main = pod["spec"]["containers"][0]
            has_key = any(entry["name"] == "TANDEM_CLUSTER_KEY" for entry in main.get("env", ()))
            assert has_key == (main["name"] not in ("valkey", "test-connection"))


def test_a_given_cluster_key_is_used_and_none_is_made() -> None:
    objects = render({"auth": {"clusterKeySecret": {"name": "mine", "key": "hex"}}})
    assert not [secret for secret in kinds(objects, "Secret") if secret["metadata"]["name"].endswith("cluster-key")]
    assert "'secretKeyRef': {'name': 'mine', 'key': 'hex'}" in str(objects)
