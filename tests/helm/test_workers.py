"""Pods of workers: slots, memory, disks, devices, where they go and what they start."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helm.chart import Object, config, containers, find, kinds, pods, preset, quantity, render, worker_pod

GIB = 2**30
NEWER = {"compatibility": {"allowUnknownFields": True}}
POOL = {"topology": {"mode": "pool"}}


def main_container(pod: Object) -> Object:
    return pod["spec"]["containers"][0]


def volume(pod: Object, name: str) -> Object:
    return next(v for v in pod["spec"]["volumes"] if v["name"] == name)


def options(pod: Object) -> dict[str, str]:
    arguments = main_container(pod)["args"]
    return dict(zip(arguments[::2], arguments[1::2], strict=True))


def test_shared_memory_holds_the_dram_tier_and_counts_as_memory() -> None:
    values = {"workers": {"resources": {"memory": "4Gi"}, "sharedMemory": "1Gi", "dramTier": {"size": "10Gi"}}}
    pod = worker_pod(render(NEWER, values), "node")
    assert quantity(volume(pod, "shared-memory")["emptyDir"]["sizeLimit"]) == 11 * GIB
    resources = main_container(pod)["resources"]
    assert quantity(resources["limits"]["memory"]) == quantity(resources["requests"]["memory"]) == 15 * GIB


@pytest.mark.parametrize(
    ("tier", "kind"),
    [
        ({"type": "emptyDir"}, "emptyDir"),
        ({"type": "ephemeral", "storageClassName": "local"}, "ephemeral"),
        ({"type": "hostPath", "path": "/mnt/nvme"}, "hostPath"),
        ({"type": "existingClaim", "claimName": "nvme"}, "persistentVolumeClaim"),
    ],
)
def test_the_engine_fills_less_of_the_ssd_tier_than_its_volume_holds(tier: dict[str, str], kind: str) -> None:
    objects = render(NEWER, {"workers": {"ssdTier": {"size": "100Gi", "reservePercent": 20, **tier}}})
    pod = worker_pod(objects, "node")
    assert kind in volume(pod, "ssd-tier")
    (mount,) = [m for m in main_container(pod)["volumeMounts"] if m["name"] == "ssd-tier"]
    store = config(objects)["prefix_store"]
    assert (store["disk_path"], store["disk_bytes"]) == (mount["mountPath"], 80 * GIB)


def test_an_ssd_tier_on_the_node_s_disk_is_limited_and_requested() -> None:
    tier = {"ssdTier": {"type": "emptyDir", "size": "100Gi"}, "resources": {"ephemeralStorage": "2Gi"}}
    pod = worker_pod(render(NEWER, {"workers": tier}), "node")
    assert volume(pod, "ssd-tier")["emptyDir"] == {"sizeLimit": "100Gi"}
    assert quantity(main_container(pod)["resources"]["requests"]["ephemeral-storage"]) == 102 * GIB


def test_without_tiers_the_configuration_has_none() -> None:
    assert "prefix_store" not in config(render())


def test_ranks_take_gpus_and_slots() -> None:
    pool = {"replicas": 3, "tensorParallel": 4, "pipelineParallel": 2, "gpu": {"count": 8}, "slotsPerPod": None}
    objects = render(NEWER, POOL, {"prefill": pool})
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
    objects = render(NEWER, POOL, {"decode": decode})
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
