"""The prefix store's tiers: memory, volumes, where pods with them go, and what the stores are told."""

from __future__ import annotations

from itertools import pairwise

import pytest

from cluster.store_plan import config_of_node
from tandem.config import PrefixStoreConfig, from_mapping
from tests.helm.chart import PRESETS, Object, config, find, preset, quantity, render, worker_pod

GIB = 2**30
DRAM = {"dramTier": {"size": "1Gi"}}
POOL = {"topology": {"mode": "pool"}}


def main_container(pod: Object) -> Object:
    return pod["spec"]["containers"][0]


def volume(pod: Object, name: str) -> Object:
    return next(v for v in pod["spec"]["volumes"] if v["name"] == name)


def test_shared_memory_and_the_dram_tier_count_as_memory_and_only_the_first_is_a_file_system() -> None:
    values = {"workers": {"resources": {"memory": "4Gi"}, "sharedMemory": "1Gi", "dramTier": {"size": "10Gi"}}}
    objects = render(values)
    pod = worker_pod(objects, "node")
    assert quantity(volume(pod, "shared-memory")["emptyDir"]["sizeLimit"]) == GIB
    resources = main_container(pod)["resources"]
    assert quantity(resources["limits"]["memory"]) == quantity(resources["requests"]["memory"]) == 15 * GIB
    assert config(objects)["prefix_store"] == {"host_bytes": 10 * GIB}


@pytest.mark.parametrize(
    ("tier", "kind"),
    [
        ({"type": "emptyDir"}, "emptyDir"),
        ({"type": "ephemeral", "storageClassName": "local"}, "ephemeral"),
        ({"type": "hostPath", "path": "/mnt/nvme"}, "hostPath"),
        ({"type": "existingClaim", "claimName": "nvme"}, "persistentVolumeClaim"),
    ],
)
def test_the_store_fills_less_of_the_ssd_tier_than_its_volume_holds(tier: dict[str, str], kind: str) -> None:
    objects = render({"workers": {**DRAM, "ssdTier": {"size": "100Gi", "reservePercent": 20, **tier}}})
    pod = worker_pod(objects, "node")
    assert kind in volume(pod, "ssd-tier")
    (mount,) = [m for m in main_container(pod)["volumeMounts"] if m["name"] == "ssd-tier"]
    store = config(objects)["prefix_store"]
    assert (store["disk_path"], store["disk_bytes"]) == (mount["mountPath"], 80 * GIB)


def test_an_ephemeral_ssd_tier_is_a_claim_of_its_pod_and_no_ephemeral_storage_of_the_node() -> None:
    tier = {"type": "ephemeral", "size": "100Gi", "storageClassName": "local-nvme"}
    pod = worker_pod(render({"workers": {**DRAM, "ssdTier": tier, "resources": {"ephemeralStorage": "2Gi"}}}), "node")
    assert volume(pod, "ssd-tier")["ephemeral"]["volumeClaimTemplate"]["spec"] == {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "local-nvme",
        "resources": {"requests": {"storage": "100Gi"}},
    }
    assert quantity(main_container(pod)["resources"]["requests"]["ephemeral-storage"]) == 2 * GIB


def test_an_ssd_tier_on_the_node_s_disk_is_limited_and_requested() -> None:
    tier = {**DRAM, "ssdTier": {"type": "emptyDir", "size": "100Gi"}, "resources": {"ephemeralStorage": "2Gi"}}
    pod = worker_pod(render({"workers": tier}), "node")
    assert volume(pod, "ssd-tier")["emptyDir"] == {"sizeLimit": "100Gi"}
    assert quantity(main_container(pod)["resources"]["requests"]["ephemeral-storage"]) == 102 * GIB


def test_without_tiers_the_configuration_has_none() -> None:
    assert "prefix_store" not in config(render())


TIERS_OF_TWO_POOLS = {
    "workers": {"dramTier": {"size": "8Gi"}},
    "prefill": {"ssdTier": {"type": "emptyDir", "size": "100Gi"}},
    "decode": {"dramTier": {"size": "0"}, "rayLabels": {"rack": "r7"}},
}


def store_of(objects: list[Object], labels: dict[str, str]) -> PrefixStoreConfig | None:
    """What the controller makes of the rendered configuration and a node's labels."""
    return config_of_node(from_mapping(config(objects)).prefix_store, labels)


@pytest.mark.parametrize("operator", [True, False])
def test_each_pool_s_store_has_the_tiers_of_its_pods(operator: bool) -> None:
    objects = render(POOL, TIERS_OF_TWO_POOLS, {"kuberay": {"enabled": operator}})
    if operator:
        groups = find(objects, "RayCluster")["spec"]["workerGroupSpecs"]
        labels = {group["groupName"]: group["labels"] for group in groups}
    else:
        labels = {name: given_labels(worker_pod(objects, name)) for name in ("prefill", "decode")}
    prefill = store_of(objects, labels["prefill"])
    assert prefill is not None
    assert (prefill.host_bytes, prefill.disk_bytes) == (8 * GIB, 90 * GIB)
    assert prefill.disk_path == "/var/lib/tandem/ssd"
    assert store_of(objects, labels["decode"]) is None
    assert labels["decode"]["rack"] == "r7"
    assert "ssd-tier" not in [volume["name"] for volume in worker_pod(objects, "decode")["spec"]["volumes"]]


def given_labels(pod: Object) -> dict[str, str]:
    arguments = main_container(pod)["args"]
    words = [word for option, word in pairwise(arguments) if option == "--label"]
    return dict(word.split("=", 1) for word in words)


def test_pools_with_the_same_tiers_need_no_labels() -> None:
    objects = render(POOL, {"workers": DRAM})
    assert set(given_labels(worker_pod(objects, "prefill"))) == {"node"}
    assert config(objects)["prefix_store"] == {"host_bytes": GIB}


def test_pods_whose_ssd_tier_is_a_directory_of_the_node_do_not_share_a_node() -> None:
    tier = {**DRAM, "ssdTier": {"type": "hostPath", "size": "1Ti", "path": "/mnt/nvme"}}
    own = {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "zone", "labelSelector": {}}]}
    objects = render(POOL, {"workers": {**tier, "affinity": {"podAntiAffinity": own}}})
    affinity = worker_pod(objects, "decode")["spec"]["affinity"]["podAntiAffinity"]
    kept, apart = affinity["requiredDuringSchedulingIgnoredDuringExecution"]
    assert kept["topologyKey"] == "zone"
    assert apart["topologyKey"] == "kubernetes.io/hostname"
    assert apart["labelSelector"]["matchExpressions"][0]["values"] == ["prefill", "decode"]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_s_store_is_one_that_tandem_takes(name: str) -> None:
    store = from_mapping(config(render(preset(name)))).prefix_store
    assert (store.host_bytes > 0) is (name != "one-node-cpu")
