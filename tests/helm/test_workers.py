"""Pods of workers: slots, devices, where they go and what they start."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helm.chart import Object, config, containers, find, kinds, pods, preset, render, worker_pod

POOL = {"topology": {"mode": "pool"}}


def main_container(pod: Object) -> Object:
    return pod["spec"]["containers"][0]


def options(pod: Object) -> dict[str, str]:
    arguments = main_container(pod)["args"]
    return dict(zip(arguments[::2], arguments[1::2], strict=True))


def test_ranks_take_gpus_and_slots() -> None:
    pool = {"replicas": 3, "tensorParallel": 4, "pipelineParallel": 2, "gpu": {"count": 8}, "slotsPerPod": None}
    objects = render(POOL, {"prefill": pool})
    pod = worker_pod(objects, "prefill")
    assert options(pod)["--prefill-slots"] == "8"
    assert options(pod)["--decode-slots"] == "0"
    assert main_container(pod)["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert find(objects, "StatefulSet", "-prefill")["spec"]["replicas"] == 3
    assert config(objects)["prefill"] == {"tensor_parallel": 4, "pipeline_parallel": 2}


@pytest.mark.parametrize(
    ("workers", "ranks", "slots", "expected"), [(4, 1, 8, 1), (5, 2, 4, 3), (8, 4, 8, 4), (0, 1, 1, 0)]
)
def test_pods_hold_all_workers_and_no_worker_is_split(workers: int, ranks: int, slots: int, expected: int) -> None:
    decode = {"replicas": workers, "tensorParallel": ranks, "slotsPerPod": slots}
    objects = render(POOL, {"decode": decode})
    assert find(objects, "StatefulSet", "-decode")["spec"]["replicas"] == expected


def test_a_pod_has_a_slot_for_each_gpu_unless_told() -> None:
    objects = render(preset("rdma-nodes"), {"decode": {"slotsPerPod": 4}})
    assert options(worker_pod(objects, "prefill"))["--prefill-slots"] == "8"
    assert options(worker_pod(objects, "decode"))["--decode-slots"] == "4"
    assert options(worker_pod(render(POOL), "decode"))["--decode-slots"] == "1"


def test_a_pool_s_own_keys_win_over_the_common_ones() -> None:
    values = {"workers": {"nodeSelector": {"a": "1"}, "gpu": {"count": 2}}, "decode": {"nodeSelector": {"a": "2"}}}
    objects = render(POOL, values)
    assert worker_pod(objects, "prefill")["spec"]["nodeSelector"] == {"a": "1"}
    assert worker_pod(objects, "decode")["spec"]["nodeSelector"] == {"a": "2"}
    assert main_container(worker_pod(objects, "decode"))["resources"]["limits"]["nvidia.com/gpu"] == 2


def test_a_kind_of_gpu_is_a_node_selector() -> None:
    pod = worker_pod(render(preset("rdma-nodes")), "decode")
    assert pod["spec"]["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H200"}


def test_racks_and_nvlink_domains_are_shared_with_the_release_s_workers() -> None:
    objects = render(POOL, {"prefill": {"rack": "required"}, "decode": {"nvlinkDomain": "preferred"}})
    required = worker_pod(objects, "prefill")["spec"]["affinity"]["podAffinity"]
    preferred = worker_pod(objects, "decode")["spec"]["affinity"]["podAffinity"]
    (term,) = required["requiredDuringSchedulingIgnoredDuringExecution"]
    (weighted,) = preferred["preferredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "topology.kubernetes.io/rack"
    assert weighted["podAffinityTerm"]["topologyKey"] == "nvidia.com/gpu.clique"
    assert term["labelSelector"]["matchExpressions"][0]["values"] == ["prefill", "decode"]


def test_an_own_affinity_is_kept_beside() -> None:
    own = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}}
    pod = worker_pod(render({"workers": {"affinity": own, "rack": "preferred"}}), "node")
    assert set(pod["spec"]["affinity"]) == {"nodeAffinity", "podAffinity"}


@pytest.mark.parametrize("enabled", [True, False])
def test_rdma_brings_device_capability_and_settings_and_only_then(enabled: bool) -> None:
    container = main_container(
        worker_pod(render({"rdma": {"enabled": enabled, "resource": "rdma/ib", "count": 2}}), "node")
    )
    assert container["resources"]["limits"].get("rdma/ib") == (2 if enabled else None)
    assert ("add" in container["securityContext"]["capabilities"]) is enabled
    environment = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert ("tcp" not in environment["UCX_TLS"]) if enabled else ("UCX_TLS" not in environment)


def test_only_workers_get_the_capability() -> None:
    objects = render({"rdma": {"enabled": True}})
    adding = [
        name for name, pod in pods(objects) for c in containers(pod) if "add" in c["securityContext"]["capabilities"]
    ]
    assert adding == ["StatefulSet/demo-tandem-node"]


def test_one_nvlink_domain_takes_both_pools() -> None:
    objects = render(preset("gb200"))
    domain = find(objects, "ComputeDomain")["spec"]
    assert domain["numNodes"] == 16 // 4 + 32 // 4
    for name in ("prefill", "decode"):
        pod = worker_pod(objects, name)
        (claim,) = pod["spec"]["resourceClaims"]
        assert claim["resourceClaimTemplateName"] == domain["channel"]["resourceClaimTemplate"]["name"]
        assert main_container(pod)["resources"]["claims"] == [{"name": claim["name"]}]


def test_the_model_s_volume_is_read_only_for_those_who_serve() -> None:
    volume_values = {"type": "download", "sizeLimit": "20Gi", "download": {"repository": "o/m", "revision": "c0ffee"}}
    objects = render({"model": {"source": "/models/x", "volume": volume_values}})
    for pod in (worker_pod(objects, "node"), worker_pod(objects, "router")):
        (mount,) = [m for m in main_container(pod)["volumeMounts"] if m["name"] == "model"]
        (fetch,) = pod["spec"]["initContainers"]
        assert mount["readOnly"]
        assert fetch["command"] == ["hf", "download", "o/m", "--revision", "c0ffee", "--local-dir", "/models"]


@pytest.mark.parametrize(
    ("volume", "source"),
    [
        (
            {"type": "pvc", "claimName": "models", "subPath": "llama"},
            {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}},
        ),
        ({"type": "hostPath", "path": "/mnt/m"}, {"hostPath": {"path": "/mnt/m", "type": "Directory"}}),
        (
            {"type": "initContainer", "sizeLimit": "9Gi", "initContainer": {"image": "fetch:1.0", "command": ["get"]}},
            {"emptyDir": {"sizeLimit": "9Gi"}},
        ),
    ],
)
def test_the_model_comes_from_a_volume_that_routers_and_workers_only_read(
    volume: dict[str, Any], source: dict[str, Any]
) -> None:
    objects = render({"model": {"source": "/models/x", "volume": volume}})
    for component in ("router", "node"):
        pod = worker_pod(objects, component)
        assert {"name": "model", **source} in pod["spec"]["volumes"]
        (mount,) = [m for m in main_container(pod)["volumeMounts"] if m["name"] == "model"]
        assert (mount["mountPath"], mount["readOnly"], mount.get("subPath")) == ("/models", True, volume.get("subPath"))
        fetching = pod["spec"].get("initContainers", [])
        assert [c["image"] for c in fetching] == (["fetch:1.0"] if volume["type"] == "initContainer" else [])
        assert all({"name": "model", "mountPath": "/models"} in c["volumeMounts"] for c in fetching)
    assert "model" not in [v["name"] for v in worker_pod(objects, "head")["spec"]["volumes"]]


def test_own_environment_volumes_and_containers_are_added() -> None:
    own: dict[str, Any] = {
        "extraEnv": [{"name": "HTTP_PROXY", "value": "http://proxy"}],
        "extraVolumes": [{"name": "certs", "secret": {"secretName": "ca"}}],
        "extraVolumeMounts": [{"name": "certs", "mountPath": "/certs"}],
        "initContainers": [{"name": "warm", "image": "busybox:1.37", "volumeMounts": []}],
    }
    objects = render({"workers": own, "router": own, "head": own})
    for component in ("node", "router", "head"):
        pod = worker_pod(objects, component)
        assert own["extraEnv"][0] in main_container(pod)["env"]
        assert own["extraVolumes"][0] in pod["spec"]["volumes"]
        assert own["extraVolumeMounts"][0] in main_container(pod)["volumeMounts"]
        assert pod["spec"]["initContainers"][0]["name"] == "warm"


def test_an_extra_object_may_use_templates() -> None:
    extra = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-mine"}}
    assert "demo-mine" in [o["metadata"]["name"] for o in kinds(render({"extraObjects": [extra]}), "ConfigMap")]
