"""Configuration files and what the command line lays over them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from cluster.config_file import load_config
from tandem.config import ClusterConfig
from tandem.errors import ConfigError


def write(tmp_path: Path, text: str, name: str = "cluster.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_without_a_file_the_defaults_hold() -> None:
    assert load_config(None, {}) == ClusterConfig()


def test_an_empty_file_means_the_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, ""), {}) == ClusterConfig()


def test_yaml_and_json_say_the_same(tmp_path: Path) -> None:
    yaml_file = write(tmp_path, "prefill:\n  num_workers: 3\ntransfer: {transport: shm}\n")
    json_file = write(tmp_path, json.dumps({"prefill": {"num_workers": 3}, "transfer": {"transport": "shm"}}), "c.json")
    assert load_config(yaml_file, {}) == load_config(json_file, {})


def test_options_override_the_file_and_unset_ones_do_not(tmp_path: Path) -> None:
    path = write(tmp_path, "prefill: {num_workers: 3}\nrouter: {grpc_port: 7}\n")
    config = load_config(path, {"prefill.num_workers": 2, "router.grpc_port": None})
    assert (config.prefill.num_workers, config.router.grpc_port) == (2, 7)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prefill: {num_workers: 0}", "prefill.num_workers must be 1 to 1024, got 0"),
        ("decode: {tensor_parallel: 0}", "decode.tensor_parallel must be 1 to 64, got 0"),
        ("prefill: {pipeline_parallel: 65}", "prefill.pipeline_parallel must be 1 to 64, got 65"),
        ("prefil: {}", "prefil is an unknown field; did you mean prefill?"),
        ("prefill: {workers: 2}", "prefill.workers is an unknown field; did you mean prefill.num_workers?"),
        ("decode: {zzz: 2}", "decode.zzz is an unknown field; known here are num_workers, "),
        ("1: {}", "1 is an unknown field; known here are cluster, "),
        ("model: {block_size: x}", "model.block_size must be an int, got 'x'"),
        ("pin_cores: 1", "pin_cores must be true or false, got 1"),
        ("- 1", "the configuration must be a mapping"),
    ],
)
def test_a_wrong_value_names_file_key_and_bound(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, {})
    assert str(path) in caught.value.message
    assert message in caught.value.message


def test_a_file_that_is_no_yaml_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not YAML or JSON"):
        load_config(write(tmp_path, "a: ["), {})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.yaml cannot be read: No such file"):
        load_config(tmp_path / "gone.yaml", {})


def test_a_wrong_option_names_its_key() -> None:
    with pytest.raises(ConfigError, match=r"router\.http_port must be 0 to 65535, got 70000"):
        load_config(None, {"router.http_port": 70000})


def test_a_password_in_the_url_of_redis_does_not_stay_in_the_configuration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TANDEM_REDIS_PASSWORD", "")
    path = write(tmp_path, "registry: {redis_url: 'redis://me:secret@store.example:6379'}\n")
    assert load_config(path, {}).registry.redis_url == "redis://me@store.example:6379"
    assert os.environ["TANDEM_REDIS_PASSWORD"] == "secret"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("router: {health_port: 70000}", "router.health_port must be 0 to 65535"),
        ("router: {health_port: 8000}", "router.health_port must be another port than router.http_port, got 8000"),
        ("controller_metrics_port: -1", "controller_metrics_port must be 0 to 65535"),
        ("registry: {redis_url: store.example}", "is not a Redis URL"),
    ],
)
def test_ports_and_urls_that_cannot_be_are_refused(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_config(write(tmp_path, text), {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prefill: {num_workers: 2\ndecode: {}\n", "line 2, column 7: expected ',' or '}', but got ':', while parsing"),
        ("model:\n\tsource: x\n", "line 2, column 1: found character '\\t' that cannot start any token"),
    ],
)
def test_what_is_no_yaml_is_named_by_line_column_and_reason(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, {})
    assert f"{path} is not YAML or JSON: {message}" in str(caught.value)
    assert str(caught.value).count(str(path)) == 1
