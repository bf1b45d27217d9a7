"""What `tandem up` says before and after its start."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from cluster import preflight
from cluster.events import ModelInfo
from cluster.preflight import warnings
from cluster.ready import command_name, context_warnings
from tandem.config import ClusterConfig, DecodeConfig, PrefillConfig


def make_config(num_workers: int = 1, num_blocks: int = 20) -> ClusterConfig:
    decode = DecodeConfig(num_workers=num_workers, num_blocks=num_blocks)
    return ClusterConfig(prefill=PrefillConfig(num_workers=num_workers), decode=decode)


def test_a_pool_that_holds_less_than_the_model_takes_is_named_with_both_numbers() -> None:
    model = ModelInfo(name="m", max_context_tokens=320, model_context_tokens=8192)
    assert context_warnings(make_config(), model) == [
        "decode.num_blocks x block_size holds 320 tokens: longer requests are refused; the model could take 8192"
    ]


def test_pools_that_hold_all_that_the_model_takes_need_no_word() -> None:
    assert not context_warnings(make_config(), ModelInfo(name="m", max_context_tokens=8192, model_context_tokens=8192))


@pytest.mark.parametrize(("num_workers", "num_cores", "is_said"), [(1, 2, False), (2, 2, True), (1, 1, True)])
def test_workers_that_share_cores_are_told_of(
    monkeypatch: pytest.MonkeyPatch, num_workers: int, num_cores: int, is_said: bool
) -> None:
    monkeypatch.setattr(preflight, "usable_cores", lambda: list(range(num_cores)))
    found = warnings(make_config(num_workers))
    assert bool(found) == is_said
    assert all("share" in text for text in found)


def make_command(directory: Path) -> Path:
    directory.mkdir()
    path = directory / "tandem"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_the_command_is_shown_as_it_can_be_called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found, other = make_command(tmp_path / "bin"), make_command(tmp_path / "with space")
    monkeypatch.setenv("PATH", f"{found.parent}{os.pathsep}/usr/bin")
    assert command_name([str(found)]) == "tandem"
    assert command_name([str(other)]) == f"'{other}'"
    assert command_name(["/somewhere/cluster/cli.py"]) == f"{sys.executable} -m cluster.cli"
