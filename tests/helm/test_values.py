"""Values that cannot work are refused, and the message says what to write."""

from __future__ import annotations

from typing import Any

import helm_python
import pytest

from tests.helm.chart import merged, preset, render


def refusal(*values: dict[str, Any]) -> str:
    with pytest.raises(helm_python.HelmError) as caught:
        render(*values)
    return str(caught.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"prefil": {}}, ["at '/prefil': ", "no such key", " prefill, "]),
        ({"decode": {"replica": 2}}, ["at '/decode/replica': ", "no such key; there are replicas, "]),
        ({"config": {"decode": {"num_block": 4}}}, ["at '/config/decode/num_block': ", " num_blocks, "]),
        ({"config": {"router": {"host": "::"}}}, ["at '/config/router/host': ", "default_timeout_s"]),
        ({"topology": {"mode": "nodes"}}, ["/topology/mode", "'node', 'pool', 'mnnvl'"]),
        ({"autoscaling": {"mode": "hpa"}}, ["'none', 'controller', 'ray', 'keda'"]),
        ({"workers": {"gpu": {"count": -1}}}, ["/workers/gpu/count", "minimum"]),
        ({"workers": {"sharedMemory": "16 GB"}}, ["/workers/sharedMemory", "pattern"]),
        ({"workers": {"ssdTier": {"reservePercent": 0}}}, ["reservePercent", "minimum"]),
        ({"prefill": {"tensorParallel": 0}}, ["/prefill/tensorParallel", "minimum"]),
        ({"decode": {"replicas": "2"}}, ["/decode/replicas", "want integer"]),
        ({"router": {"grpcPort": 80}}, ["/router/grpcPort", "1,024"]),
        ({"externalRedis": {"url": "redis://user:secret@host:6379"}}, ["/externalRedis/url"]),
    ],
)
def test_the_schema_names_what_is_wrong_and_what_there_is(values: dict[str, Any], words: list[str]) -> None:
    message = refusal(values)
    assert all(word in message for word in words), message
    assert message.count("at '/") == 1, message


CLAIM = {
    "workers": {
        "dramTier": {"size": "1Gi"},
        "ssdTier": {"type": "existingClaim", "claimName": "nvme", "size": "1Ti"},
    }
}
KEDA = {"autoscaling": {"mode": "keda", "keda": {"prometheusAddress": "http://p:9090"}}, "topology": {"mode": "pool"}}


@pytest.mark.parametrize(
    ("values", "write"),
    [
        ({"autoscaling": {"mode": "ray"}}, "write kuberay.enabled: true"),
        (merged(KEDA, {"kuberay": {"enabled": True}}), "write kuberay.enabled: false, or autoscaling.mode: ray"),
        (merged(KEDA, {"topology": {"mode": "node"}}), "write topology.mode: pool"),
        (merged(KEDA, {"autoscaling": {"keda": {"prometheusAddress": ""}}}), "keda.prometheusAddress, as in"),
        ({"kuberay": {"enabled": True, "tls": True}}, 'write kuberay.version: "1.7"'),
        ({"kuberay": {"version": "1.5", "upgradeStrategy": "None"}}, 'write kuberay.version: "1.6"'),
        ({"prefill": {"replicas": 3, "maxReplicas": 2}}, "write a number from minReplicas (1) to maxReplicas (2)"),
        ({"prefill": {"replicas": 3}}, "prefill.replicas is 3, but 1 nodes with 1 slots have room for 1 workers"),
        ({"topology": {"mode": "pool"}, "decode": {"tensorParallel": 2}}, "slotsPerPod: 2 or more"),
        ({"node": {"prefillSlots": 3, "gpu": {"count": 2}}}, "write 2 or fewer slots"),
        (
            {"node": {"gpu": {"count": 2}, "prefillSlots": 2, "decodeSlots": 2}, "prefill": {"replicas": 2}},
            "the pools have 3 ranks together, the nodes 2 GPUs",
        ),
        ({"node": {"maxReplicas": 1, "replicas": 2}}, "write node.replicas (2) or more"),
        ({"workers": {"ssdTier": {"type": "emptyDir"}}}, "write ssdTier.size"),
        ({"workers": {"ssdTier": {"type": "hostPath", "size": "1Ti"}}}, "write ssdTier.path"),
        ({"workers": {"ssdTier": {"type": "existingClaim", "size": "1Ti"}}}, "write ssdTier.claimName"),
        ({"workers": {"ssdTier": {"type": "emptyDir", "size": "1Ti"}}}, "write dramTier.size"),
        (
            {"workers": {"dramTier": {"size": "1Gi"}}, "config": {"prefix_store": {"enabled": False}}},
            'write config.prefix_store.enabled: true, or dramTier.size: "0"',
        ),
        (merged(CLAIM, {"node": {"replicas": 2}}), "write ssdTier.type: ephemeral"),
        ({"config": {"transfer": {"transport": "shm"}}, "topology": {"mode": "pool"}}, "write ucx"),
        ({"config": {"transfer": {"transport": "shm"}}, "rdma": {"enabled": True}}, "config.transfer.transport: ucx"),
        ({"valkey": {"enabled": False}}, "write externalRedis.url"),
        ({"externalRedis": {"url": "redis://r:6379"}}, "write valkey.enabled: false"),
        ({"tls": {"clientCa": True}}, "write tls.secretName"),
        ({"tls": {"clientCa": True, "secretName": "a"}}, "write tls.clientSecretName, or tests.enabled: false"),
        (
            {
                "tls": {"clientCa": True, "secretName": "a"},
                "tests": {"enabled": False},
                "metrics": {"serviceMonitor": {"enabled": True}},
            },
            "write tls.clientSecretName, or metrics.serviceMonitor.enabled: false",
        ),
        ({"ingress": {"enabled": True}}, "write ingress.host"),
        ({"router": {"healthPort": 8000}}, "write three ports"),
        ({"router": {"autoscaling": {"enabled": True, "cpuPercent": 0}}}, "write cpuPercent or runningRequestsPerPod"),
        ({"router": {"autoscaling": {"enabled": True, "minReplicas": 20}}}, "write maxReplicas (10) or fewer"),
        ({"model": {"volume": {"type": "pvc"}}}, "model.volume.claimName: write it"),
        ({"model": {"volume": {"type": "hostPath"}}}, "model.volume.path: write it"),
        ({"model": {"volume": {"type": "initContainer"}}}, "initContainer (with an image) and sizeLimit: write it"),
        ({"model": {"volume": {"type": "download"}}}, "download.revision and sizeLimit: write it"),
        ({"workers": {"terminationGracePeriodSeconds": 30}}, "write 85 or more"),
    ],
)
def test_a_combination_that_cannot_work_is_refused(values: dict[str, Any], write: str) -> None:
    assert write in refusal(values)


def test_a_size_that_the_schema_lets_by_is_understood() -> None:
    for size in ("1073741824", "1G", "1.5Gi", "1024Mi"):
        render({"workers": {"sharedMemory": size}})


def test_a_preset_may_be_overridden() -> None:
    render(preset("rdma-nodes"), {"decode": {"replicas": 24}, "rdma": {"enabled": False}})
