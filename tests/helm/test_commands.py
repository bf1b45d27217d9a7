"""Pods run commands that the image has, with options that these have, and a configuration that is taken."""

from __future__ import annotations

import re

import pytest
import typer.main
import yaml
from typer.core import TyperGroup

from cluster.cli import app
from tandem.config import ClusterConfig, from_mapping
from tests.helm.chart import Object, config, containers, find, pods, render
from tests.helm.test_valid import CASES


def command_lines(pod: Object) -> list[list[str]]:
    """All that a pod runs of ours: containers, probes, hooks."""
    found = []
    for container in containers(pod):
        hooks = [container[key] for key in ("startupProbe", "livenessProbe", "readinessProbe") if key in container]
        hooks += list(container.get("lifecycle", {}).values())
        found.append([*container.get("command", []), *container.get("args", [])])
        found += [hook["exec"]["command"] for hook in hooks if "exec" in hook]
    shells = [line for line in found if line[:2] == ["sh", "-c"]]
    lines = [line for line in found if line not in shells] + [line[2].removeprefix("exec ").split() for line in shells]
    return [line for line in lines if line and line[0] == "tandem"]


def parse(line: list[str]) -> None:
    """As the command line would, up to running it. Raises what it shows as wrong usage."""
    values = {"$(POD_IP)": "10.0.0.1", "$(NODE_NAME)": "n1", "$(TANDEM_REDIS_URL)": "redis://r:6379"}
    values |= {f'"${re.sub("[^A-Z_]", "", name)}"': value for name, value in values.items()}
    words = [line[1]]
    for word in line[2:]:
        for name, value in values.items():
            word = word.replace(name, value)
        words.append(word)
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    context = group.make_context("tandem", [words[0]])
    command = group.get_command(context, words[0])
    assert command is not None, f"there is no command tandem {words[0]}"
    command.make_context(words[0], words[1:], parent=context)


@pytest.mark.parametrize("name", CASES)
def test_pods_run_commands_with_options_that_exist(name: str) -> None:
    lines = {tuple(line) for _, pod in pods(render(CASES[name])) for line in command_lines(pod)}
    assert lines
    for line in lines:
        parse(list(line))


def test_an_option_that_does_not_exist_is_found() -> None:
    with pytest.raises(Exception, match="--redis-uri"):
        parse(["tandem", "router", "--redis-uri", "$(TANDEM_REDIS_URL)"])


@pytest.mark.parametrize("name", CASES)
def test_the_configuration_is_taken(name: str) -> None:
    built = from_mapping(config(render(CASES[name])))
    assert (built.router.host, built.router.grpc_port, built.router.health_port) == ("0.0.0.0", 50051, 8081)


def test_what_is_given_under_config_arrives() -> None:
    given = {"prefill": {"max_batch_tokens": 2048}, "transfer": {"lease_s": 4.5}, "drain_timeout_s": 7}
    built = from_mapping(config(render({"config": given})))
    assert (built.prefill.max_batch_tokens, built.transfer.lease_s, built.drain_timeout_s) == (2048, 4.5, 7)


def test_defaults_stay_the_engine_s_own() -> None:
    written = config(render())
    assert from_mapping(written).decode == ClusterConfig().decode
    assert from_mapping(written).transfer == ClusterConfig().transfer


def test_files_in_the_configuration_are_mounted() -> None:
    objects = render(CASES["keda"], {"auth": {"apiKeysSecret": {"name": "keys"}}})
    router = from_mapping(config(objects)).router
    mounts = {
        m["mountPath"]
        for _, pod in pods([find(objects, "Deployment", "-router")])
        for c in containers(pod)
        for m in c["volumeMounts"]
    }
    for path in (router.tls_cert_file, router.tls_key_file, router.tls_client_ca_file, router.api_keys_file):
        assert path.rpartition("/")[0] in mounts


def test_the_sizes_file_says_what_the_values_say() -> None:
    objects = render({"node": {"decodeSlots": 3}, "decode": {"replicas": 3}}, revision=7)
    sizes = yaml.safe_load(find(objects, "ConfigMap", "-sizes")["data"]["sizes.yaml"])
    assert sizes == {"prefill": 1, "decode": 3, "generation": 7}


def test_rdma_is_asked_for_by_the_test_only_where_it_is_there() -> None:
    with_rdma, without = (
        find(render({"rdma": {"enabled": on}}), "Pod")["spec"]["containers"][0]["args"] for on in (True, False)
    )
    assert with_rdma[-2:] == ["--require-transport", "rdma"]
    assert "--require-transport" not in without
