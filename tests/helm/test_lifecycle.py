"""Starting, ending and upgrading: probes, drains, grace periods, and what makes pods start again."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.config import ClusterConfig
from tests.helm.chart import Object, config, find, kinds, pods, preset, render, worker_pod

POOL = {"topology": {"mode": "pool"}}
RAY = {"kuberay": {"enabled": True}}


def grace(pod: Object) -> int:
    seconds: int = pod["spec"]["terminationGracePeriodSeconds"]
    return seconds


@pytest.mark.parametrize(
    ("drain", "lease", "replacement"), [(30, 10, 30), (120, 20, 900), (7.5, 0.5, 30), (0, 10, 0)]
)
def test_a_worker_s_grace_covers_drain_lease_and_successors(drain: float, lease: float, replacement: float) -> None:
    timeouts = {"drain_timeout_s": drain, "replacement_timeout_s": replacement}
    values = {"config": {**timeouts, "transfer": {"lease_s": lease}}}
    needed = drain + lease + replacement
    for extra in ({}, RAY):
        pod = worker_pod(render(POOL, values, extra), "decode")
        assert needed < grace(pod) < needed + 20


def test_the_operator_s_workers_drain_before_ray_is_stopped_and_are_left_time_for_it() -> None:
    pod = worker_pod(render(POOL, RAY, {"config": {"drain_timeout_s": 60}}), "prefill")
    command = pod["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1]
    timeout = int(command.rpartition("--timeout ")[2])
    assert command.startswith("exec tandem drain-node ")
    assert 60 + 10 + ClusterConfig().replacement_timeout_s <= timeout < grace(pod)


def test_without_the_operator_the_node_drains_itself() -> None:
    assert "lifecycle" not in worker_pod(render(), "node")["spec"]["containers"][0]


def test_a_router_s_grace_covers_its_lingering_and_its_drain() -> None:
    objects = render({"router": {"lingerSeconds": 12}, "config": {"drain_timeout_s": 90}})
    assert config(objects)["router"]["linger_s"] == 12
    assert 102 < grace(worker_pod(objects, "router")) < 120


def test_a_longer_grace_is_taken() -> None:
    assert grace(worker_pod(render({"workers": {"terminationGracePeriodSeconds": 600}}), "node")) == 600


@pytest.mark.parametrize(
    ("values", "name", "question"),
    [
        (POOL, "decode", "router-admitted"),
        ({**POOL, **RAY}, "decode", "router-admitted"),
        ({**POOL, "autoscaling": {"mode": "controller"}}, "decode", "ready"),
        ({}, "node", "ready"),
    ],
)
def test_a_pod_that_is_there_for_a_worker_is_ready_when_routers_admit_it(values: Any, name: str, question: str) -> None:
    container = worker_pod(render(values), name)["spec"]["containers"][0]
    assert container["readinessProbe"]["exec"]["command"][-1].endswith(f"--for {question}")
    assert container["livenessProbe"]["exec"]["command"][-1].endswith("--for live")


@pytest.mark.parametrize("tls", [{}, {"tls": {"secretName": "s", "clientCa": True, "clientSecretName": "c"}}])
def test_routers_are_probed_on_the_plaintext_port(tls: dict[str, Any]) -> None:
    container = worker_pod(render(tls, {"router": {"healthPort": 9999}}), "router")["spec"]["containers"][0]
    assert {container[f"{kind}Probe"]["grpc"]["port"] for kind in ("startup", "liveness", "readiness")} == {9999}
    assert container["readinessProbe"]["grpc"]["service"] == "tandem.v1.Inference"
    assert "service" not in container["livenessProbe"]["grpc"]


def changed_pods(before: list[Object], after: list[Object]) -> set[str]:
    old, new = dict(pods(before)), dict(pods(after))
    return {name.rpartition("/")[2] for name in old | new if old.get(name) != new.get(name) and "test" not in name}


@pytest.mark.parametrize("name", ["one-node-cpu", "rdma-nodes", "production", "gb200", "one-node-8gpu"])
def test_another_size_starts_no_pod_again(name: str) -> None:
    values = preset(name)
    more = {"decode": {"replicas": values["decode"]["replicas"] + 1}}
    if name == "one-node-8gpu":
        more["prefill"] = {"replicas": values["prefill"]["replicas"] - 1}
    before, after = render(values), render(values, more, revision=2)
    assert changed_pods(before, after) == set()
    assert find(before, "ConfigMap", "-sizes") != find(after, "ConfigMap", "-sizes")


def test_another_decode_size_changes_decode_s_set_alone() -> None:
    values = preset("rdma-nodes")
    before, after = render(values), render(values, {"decode": {"replicas": 40}})
    changed = [a["metadata"]["name"] for b, a in zip(before, after, strict=True) if a != b]
    assert changed == ["demo-tandem-sizes", "demo-tandem-decode"]


def test_the_revision_numbers_the_sizes_and_nothing_else() -> None:
    changed = [a for b, a in zip(render(), render(revision=2), strict=True) if a != b]
    assert [o["metadata"]["name"] for o in changed] == ["demo-tandem-sizes"]


def test_a_change_of_configuration_starts_those_again_whom_it_concerns() -> None:
    assert changed_pods(render(), render({"config": {"router": {"max_running_requests": 9}}})) == {"demo-tandem-router"}
    everyone = {"demo-tandem-router", "demo-tandem-head", "demo-tandem-node"}
    assert changed_pods(render(), render({"config": {"decode": {"num_blocks": 99}}})) == everyone


def test_every_kind_of_pod_that_serves_has_a_disruption_budget() -> None:
    selected = {
        o["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"]
        for o in kinds(render(POOL), "PodDisruptionBudget")
    }
    assert selected == {"router", "prefill", "decode"}


def test_a_rollout_of_routers_never_has_fewer_of_them() -> None:
    strategy = find(render(), "Deployment", "-router")["spec"]["strategy"]["rollingUpdate"]
    assert strategy == {"maxSurge": 1, "maxUnavailable": 0}


def test_a_head_gives_way_before_the_next_one_starts() -> None:
    assert find(render(), "Deployment", "-head")["spec"]["strategy"] == {"type": "Recreate"}
