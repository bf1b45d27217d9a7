"""The stand-in's parts that only decide: merging, selecting, expanding, judging probes, Ray's command lines."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from tests.kube.kinds import Document
from tests.kube.merge import apply_configuration, merge_patch, strategic_merge
from tests.kube.pod_env import expand, quantity, resource_value
from tests.kube.pod_volumes import VolumeFile, swap_files
from tests.kube.probes import ProbeSettings, ProbeState
from tests.kube.ray_start import head_parameters, ray_start, storage_environment, with_command, worker_parameters
from tests.kube.selection import matches_fields, matches_labels, matches_query
from tests.kube.wire import MAGIC, decode_delete_options, decode_secret


def test_a_merge_patch_removes_what_is_null_and_leaves_the_rest() -> None:
    assert merge_patch({"a": 1, "b": {"c": 2, "d": 3}}, {"a": None, "b": {"c": 4}}) == {"b": {"c": 4, "d": 3}}


def test_a_strategic_merge_merges_lists_by_name() -> None:
    live = {"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]}
    patch = {"env": [{"name": "B", "value": "3"}, {"name": "A", "$patch": "delete"}]}
    assert strategic_merge(live, patch) == {"env": [{"name": "B", "value": "3"}]}


def test_applying_takes_back_what_the_applier_no_longer_has_and_nothing_of_others() -> None:
    live = {"spec": {"replicas": 3, "paused": True, "clusterIP": "10.0.0.1"}}
    previous = {"spec": {"replicas": 3, "paused": True}}
    assert apply_configuration(live, previous, {"spec": {"replicas": 1}}) == {
        "spec": {"replicas": 1, "clusterIP": "10.0.0.1"}
    }


@pytest.mark.parametrize(
    ("selector", "matches"),
    [
        ("app=web", True),
        ("app==web,tier!=db", True),
        ("app in (api, web)", True),
        ("app notin (web)", False),
        ("tier", False),
        ("!tier,app", True),
        ("", True),
    ],
)
def test_a_label_selector_of_a_query(selector: str, matches: bool) -> None:
    assert matches_query(selector, {"app": "web"}) is matches


def test_a_label_selector_that_cannot_be_read_is_an_error() -> None:
    with pytest.raises(ValueError, match="unreadable"):
        matches_query("=web", {})


def test_a_workloads_selector_needs_labels_and_expressions() -> None:
    selector = {"matchLabels": {"app": "web"}, "matchExpressions": [{"key": "old", "operator": "DoesNotExist"}]}
    assert matches_labels(selector, {"app": "web"})
    assert not matches_labels(selector, {"app": "web", "old": ""})


def test_a_field_selector_follows_the_path() -> None:
    pod: Document = {"metadata": {"name": "a"}, "status": {"phase": "Running"}}
    assert matches_fields("metadata.name=a,status.phase!=Failed", pod)
    assert not matches_fields("status.phase=Failed", pod)


def test_references_in_a_command_are_expanded_where_they_are_known() -> None:
    assert expand("$(A) $(B) $$(A) $A", {"A": "1"}) == "1 $(B) $(A) $A"


@pytest.mark.parametrize(("text", "number"), [("2", 2), ("500m", 0.5), ("1Gi", 2**30), ("3k", 3000)])
def test_quantities(text: str, number: float) -> None:
    assert quantity(text) == number


def test_a_resource_is_told_in_units_of_the_divisor_rounded_up() -> None:
    container = {"resources": {"limits": {"memory": "1500Mi", "cpu": "1500m"}}}
    assert resource_value(container, {"resource": "limits.memory", "divisor": "1Gi"}) == "2"
    assert resource_value(container, {"resource": "limits.cpu"}) == "2"


def test_files_of_a_volume_change_all_at_once_and_by_the_way_of_a_link(tmp_path: Path) -> None:
    swap_files(tmp_path, [VolumeFile(path=name, content=b"1", mode=0o644) for name in ("a", "b")])
    opened = (tmp_path / "a").open()
    swap_files(tmp_path, [VolumeFile(path="a", content=b"2", mode=0o644)])
    with opened:
        assert opened.read() == "1"
    assert (tmp_path / "a").read_text() == "2"
    assert not (tmp_path / "b").exists()
    assert (tmp_path / "a").is_symlink()


def test_a_probe_decides_after_enough_answers_in_a_row() -> None:
    state = ProbeState(ProbeSettings.of({"failureThreshold": 2}))
    verdicts = []
    for answer in (False, True, False, False, True):
        state.note(answer)
        verdicts.append(state.verdict)
    assert verdicts == [None, True, True, False, True]


def test_a_hurried_probe_is_as_patient_as_before() -> None:
    normal = ProbeSettings.of({"periodSeconds": 10, "failureThreshold": 3, "initialDelaySeconds": 5})
    hurried = normal.hurried(0.5)
    assert hurried.period_s == 0.5
    assert hurried.failure_threshold * hurried.period_s == 35


# --- protobuf


def field(number: int, content: bytes) -> bytes:
    """A field of bytes, shorter than 128."""
    return bytes([number << 3 | 2, len(content)]) + content


def test_a_secret_is_read_from_protobuf() -> None:
    label = field(11, field(1, b"owner") + field(2, b"helm"))
    metadata = field(1, b"release") + field(3, b"prod") + label
    secret = field(1, metadata) + field(2, field(1, b"key") + field(2, b"value")) + field(3, b"Opaque")
    assert decode_secret(MAGIC + field(2, secret)) == {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "release", "namespace": "prod", "labels": {"owner": "helm"}},
        "data": {"key": base64.b64encode(b"value").decode()},
        "type": "Opaque",
    }


def test_options_of_a_deletion_are_read_from_protobuf() -> None:
    options = bytes([1 << 3, 30]) + field(4, b"Foreground")
    assert decode_delete_options(MAGIC + field(2, options)) == {"propagationPolicy": "Foreground"}


def test_something_else_is_not_taken_for_protobuf() -> None:
    with pytest.raises(ValueError, match="protobuf"):
        decode_secret(b"{}")


# --- Ray's command line


def group(**more: object) -> Document:
    container = {"name": "ray", "image": "tandem", "resources": {"limits": {"cpu": "1500m", "memory": "1Gi"}}}
    return {"template": {"spec": {"containers": [container]}}, **more}


def test_a_head_starts_with_what_the_operator_adds() -> None:
    line = ray_start(head_parameters(group(rayStartParams={"num-cpus": "0"}), storage={}), is_head=True)
    assert line == (
        "ray start --head --block --dashboard-agent-listen-port=52365 --dashboard-host=0.0.0.0 "
        "--memory=1073741824 --metrics-export-port=8080 --num-cpus=0"
    )


def test_a_head_keeps_its_state_in_the_redis_that_it_was_given() -> None:
    storage = {"redisAddress": "valkey:6379", "redisUsername": {"value": "ray"}, "externalStorageNamespace": "prod"}
    assert "--redis-username=$REDIS_USERNAME" in ray_start(head_parameters(group(), storage=storage), is_head=True)
    assert storage_environment(storage) == [
        {"name": "RAY_REDIS_ADDRESS", "value": "valkey:6379"},
        {"name": "RAY_external_storage_namespace", "value": "prod"},
        {"name": "REDIS_USERNAME", "value": "ray"},
    ]


def test_a_worker_joins_the_head_with_its_labels_and_resources() -> None:
    parameters = worker_parameters(
        group(labels={"rack": "r7"}, rayStartParams={"resources": """'{"x": 1}'"""}), "head:6379"
    )
    line = ray_start(parameters, is_head=False)
    assert line.startswith("ray start --address=head:6379 --block")
    assert "--labels=rack=r7 " in line
    assert line.endswith("""--num-cpus=2 --resources='{"x": 1}'""")


def test_a_containers_own_command_runs_first() -> None:
    template: Document = {"spec": {"containers": [{"name": "ray", "command": ["prepare"], "args": ["it"]}]}}
    changed = with_command(template, "ray start")
    assert changed["spec"]["containers"][0]["args"] == ["ulimit -n 65536; prepare it && ray start"]
