"""Where the cluster's key comes from, and that a new one is readable by its owner alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tandem.config import ClusterConfig, SecurityConfig
from tandem.errors import ConfigError
from tandem.key_source import KEY_VARIABLE, default_path, given_key, load_key, provide_key
from tandem.secret import ClusterKey

FIRST, SECOND, THIRD = (ClusterKey(bytes([n]) * 32) for n in (1, 2, 3))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv(KEY_VARIABLE, "")
    return tmp_path


def with_file(path: Path, key: ClusterKey) -> ClusterConfig:
    path.write_text(key.to_hex() + "\n")
    return ClusterConfig(security=SecurityConfig(key_file=str(path)))


def test_the_environment_wins_over_the_file_and_that_over_the_default_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = with_file(tmp_path / "key", SECOND)
    default_path(config).parent.mkdir()
    default_path(config).write_text(THIRD.to_hex())
    assert load_key(ClusterConfig()) == THIRD
    assert load_key(config) == SECOND
    monkeypatch.setenv(KEY_VARIABLE, FIRST.to_hex())
    assert load_key(config) == FIRST


def test_without_a_key_the_error_says_where_one_may_be_put() -> None:
    assert given_key(ClusterConfig()) is None
    with pytest.raises(ConfigError, match=KEY_VARIABLE):
        load_key(ClusterConfig())


def test_a_key_file_that_is_not_there_is_an_error_even_with_a_default_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing"):
        load_key(ClusterConfig(security=SecurityConfig(key_file=str(tmp_path / "missing"))))


def test_a_cluster_of_one_machine_draws_a_key_and_hands_it_to_its_children_only() -> None:
    key = provide_key(ClusterConfig(), kept=False)
    assert os.environ[KEY_VARIABLE] == key.to_hex()
    assert not default_path(ClusterConfig()).exists()


def test_a_cluster_of_several_nodes_keeps_its_key_for_its_owner_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ClusterConfig(cluster="of/nodes")
    key = provide_key(config, kept=True)
    monkeypatch.setenv(KEY_VARIABLE, "")
    assert provide_key(config, kept=True) == key
    assert default_path(config).stat().st_mode & 0o777 == 0o600
