"""What runs in a pod: its environment, files, network, probes and end, as a kubelet would have it."""

from __future__ import annotations

import base64
import urllib.request

import psutil
import pytest

from tests.kube.kinds import Document
from tests.kube.objects import (
    PYTHON,
    container,
    end,
    key,
    log_of,
    named,
    pod,
    put,
    service,
    status_of,
    until_phase,
)
from tests.kube.pods import is_ready, pod_key
from tests.kube.stand_in import StandIn
from tests.kube.store import Key
from tests.kube.waiting import until

SERVER = [PYTHON, "-m", "http.server", "8080"]


def run_to_the_end(cluster: StandIn, name: str, *containers: Document, **spec: object) -> str:
    """Runs a pod whose containers end by themselves; the first one's log."""
    put(cluster, pod(name, *containers, restartPolicy="Never", **spec))
    until_phase(cluster, name, "Succeeded")
    log = log_of(cluster, name, containers[0]["name"])
    end(cluster, name)
    return log


def test_a_container_gets_its_environment_from_everywhere(cluster: StandIn) -> None:
    secret = {"password": base64.b64encode(b"sesame").decode()}
    put(cluster, named("Secret", "door", data=secret), named("ConfigMap", "room", data={"COLOUR": "green"}))
    env = [
        {"name": "OWN", "value": "plain"},
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "PASSWORD", "valueFrom": {"secretKeyRef": {"name": "door", "key": "password"}}},
        {"name": "MAYBE", "valueFrom": {"secretKeyRef": {"name": "door", "key": "none", "optional": True}}},
        {"name": "URL", "value": "http://$(OWN)@$(POD_IP)"},
    ]
    source = [{"configMapRef": {"name": "room"}}]
    command = ["sh", "-c", 'echo "$PASSWORD $COLOUR $1 $HOSTNAME ${MAYBE-unset}"', "sh", "$(URL)"]
    log = run_to_the_end(cluster, "env", container(*command, env=env, envFrom=source))
    password, colour, url, host, maybe = log.split()
    assert (password, colour, host, maybe) == ("sesame", "green", "env", "unset")
    assert url.startswith("http://plain@127.")


def test_a_pod_waits_for_what_it_refers_to(cluster: StandIn) -> None:
    env = [{"name": "A", "valueFrom": {"configMapKeyRef": {"name": "late", "key": "a"}}}]
    put(cluster, pod("waits", container("sh", "-c", "echo got $A", env=env), restartPolicy="Never"))
    until(lambda: "'late' not found" in log_of(cluster, "waits", "pod"))
    put(cluster, named("ConfigMap", "late", data={"a": "it"}))
    until_phase(cluster, "waits", "Succeeded")
    assert log_of(cluster, "waits") == "got it\n"
    end(cluster, "waits")


def test_mounts_are_where_the_spec_says_for_shells_and_for_python(cluster: StandIn) -> None:
    put(cluster, named("ConfigMap", "files", data={"config.yaml": "a: 1", "run.sh": "cat /etc/app/config.yaml"}))
    mounts = [
        {"name": "files", "mountPath": "/etc/app"},
        {"name": "files", "mountPath": "/srv/one.yaml", "subPath": "config.yaml"},
        {"name": "work", "mountPath": "/var/work"},
    ]
    volumes = [{"name": "files", "configMap": {"name": "files"}}, {"name": "work", "emptyDir": {}}]
    script = "import os; os.makedirs('/var/work/a'); print(open('/srv/one.yaml').read(), os.listdir('/var/work'))"
    first = container("sh", "-c", "sh /etc/app/run.sh > /var/work/copy", name="prepare", volumeMounts=mounts)
    second = container(PYTHON, "-c", script, volumeMounts=mounts)
    log = run_to_the_end(cluster, "mounts", second, initContainers=[first], volumes=volumes)
    assert log.startswith("a: 1 [")
    assert "'copy'" in log


def test_init_containers_run_before_and_sidecars_beside_the_others(cluster: StandIn) -> None:
    mounts = [{"name": "work", "mountPath": "/var/work"}]
    sidecar = container("sh", "-c", "touch /var/work/side; exec sleep 600", name="side", volumeMounts=mounts)
    probe = {"exec": {"command": ["test", "-e", "/var/work/side"]}}
    first = container("sh", "-c", "touch /var/work/first", name="first", volumeMounts=mounts)
    log = run_to_the_end(
        cluster,
        "ordered",
        container("sh", "-c", "ls /var/work", volumeMounts=mounts),
        initContainers=[first, {**sidecar, "restartPolicy": "Always", "startupProbe": probe}],
        volumes=[{"name": "work", "emptyDir": {}}],
    )
    assert log.split() == ["first", "side"]


def test_two_pods_listen_on_the_same_port_of_all_their_addresses(cluster: StandIn) -> None:
    names = ("one", "two")
    probe = {"httpGet": {"path": "/", "port": 8080}}
    put(cluster, *(pod(name, container(*SERVER, readinessProbe=probe)) for name in names))
    until(lambda: all(is_ready({"status": status_of(cluster, name)}) for name in names))
    for name in names:
        with urllib.request.urlopen(f"http://{status_of(cluster, name)['podIP']}:8080/", timeout=5) as answer:
            assert answer.status == 200
    end(cluster, *names)


def test_a_service_leads_to_ready_pods_alone_and_by_name(cluster: StandIn) -> None:
    ready = {"exec": {"command": ["test", "-e", "go"]}}
    serve = container("sh", "-c", f"echo $HOSTNAME > index.html; exec {' '.join(SERVER)}", readinessProbe=ready)
    labels = {"app": "site"}
    put(cluster, service("site", app="site"), *(pod(name, serve, labels=labels) for name in ("a", "b")))
    put(cluster, pod("asks", container("sh", "-c", "exec sleep 600")))
    until_phase(cluster, "b", "Running")
    uid = cluster.store.get(pod_key("default", "b"))["metadata"]["uid"]  # type: ignore[index]
    (main,) = cluster.kubelet.worker(uid).main
    assert main.execute(["touch", "go"], 5.0)
    until(lambda: is_ready({"status": status_of(cluster, "b")}))
    get = "import urllib.request as r; print([r.urlopen('http://site.default.svc').read() for _ in range(4)])"
    until(lambda: backends_of(cluster, "site") == [status_of(cluster, "b")["podIP"]])
    log = run_to_the_end(cluster, "client", container(PYTHON, "-c", get))
    assert log == f"{[b'b' + bytes([10])] * 4}\n"
    end(cluster, "a", "b", "asks")


def backends_of(cluster: StandIn, name: str) -> list[str]:
    """The addresses behind a Service."""
    found = cluster.store.get(Key(api="v1", plural="endpoints", namespace="default", name=name))
    subsets = [] if found is None else found["subsets"]
    return [address["ip"] for subset in subsets for address in subset.get("addresses", ())]


def test_a_container_whose_liveness_probe_fails_is_started_again(cluster: StandIn) -> None:
    """Its process ignores SIGTERM, and is killed when the grace period is over."""
    script = "trap '' TERM; echo began; while :; do sleep 0.1; done"
    probe = {"exec": {"command": ["false"]}, "periodSeconds": 1, "failureThreshold": 1}
    put(cluster, pod("sick", container("sh", "-c", script, livenessProbe=probe), terminationGracePeriodSeconds=1))
    until(lambda: log_of(cluster, "sick").count("began") >= 2)
    until(lambda: status_of(cluster, "sick")["containerStatuses"][0]["restartCount"] >= 1)
    until(lambda: "killed: did not end within 1 s" in log_of(cluster, "sick"))
    end(cluster, "sick")


@pytest.mark.parametrize(
    ("probe", "port"),
    [({"tcpSocket": {"port": "web"}}, 8080), ({"httpGet": {"port": "web", "path": "/missing"}}, None)],
)
def test_a_probe_of_a_port_decides_whether_a_pod_is_ready(
    cluster: StandIn, probe: Document, port: int | None
) -> None:
    ports = [{"name": "web", "containerPort": 8080}]
    put(cluster, pod("probed", container(*SERVER, readinessProbe=probe, ports=ports)))
    if port is None:
        until(lambda: '"GET /missing HTTP/1.1" 404' in log_of(cluster, "probed"))
    else:
        until(lambda: is_ready({"status": status_of(cluster, "probed")}))
    assert is_ready({"status": status_of(cluster, "probed")}) == (port is not None)
    end(cluster, "probed")


def test_a_pod_that_ends_runs_its_hook_first_and_gets_sigterm_then(cluster: StandIn) -> None:
    script = "trap 'echo asked; exit 0' TERM; echo began; while :; do sleep 0.1; done"
    hook = {"preStop": {"exec": {"command": ["echo", "hooked"]}}}
    put(cluster, pod("polite", container("sh", "-c", script, lifecycle=hook)))
    until(lambda: "began" in log_of(cluster, "polite"))
    end(cluster, "polite")
    assert log_of(cluster, "polite").split() == ["began", "hooked", "asked"]


def test_what_a_container_left_running_ends_with_it(cluster: StandIn) -> None:
    script = "import subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid)"
    pid = int(run_to_the_end(cluster, "leaves", container(PYTHON, "-c", script)))
    assert not psutil.pid_exists(pid)


def test_a_job_tries_again_until_it_succeeds(cluster: StandIn) -> None:
    claim = named("PersistentVolumeClaim", "kept", spec={"accessModes": ["ReadWriteOnce"]})
    script = "echo try; test -e /kept/again || { touch /kept/again; exit 3; }"
    spec = {
        "restartPolicy": "Never",
        "containers": [container("sh", "-c", script, volumeMounts=[{"name": "kept", "mountPath": "/kept"}])],
        "volumes": [{"name": "kept", "persistentVolumeClaim": {"claimName": "kept"}}],
    }
    job = named("Job", "twice", spec={"template": {"metadata": {"labels": {"app": "twice"}}, "spec": spec}})
    put(cluster, claim, job)

    def status() -> Document:
        found = cluster.store.get(key(cluster, job))
        return {} if found is None else found.get("status", {})

    until(lambda: status().get("succeeded") == 1, what=status)
    assert status()["failed"] == 1
    cluster.store.delete(key(cluster, job), graceful=False)
    until(lambda: not [p for p in cluster.store.list("v1", "pods") if p["metadata"]["labels"].get("app") == "twice"])
