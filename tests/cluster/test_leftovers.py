"""What a cluster that was killed leaves in the directory for temporary files goes with the next start."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.leftovers import remove_leftovers
from cluster.processes import make_temp_dir

NO_PROCESS = 2**22 + 1
"""More than Linux gives."""


@pytest.fixture
def temp_dir() -> Iterator[Path]:
    """One with a short path: sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as path:
        yield Path(path)


def make_dir(temp_dir: Path, name: str) -> Path:
    path = temp_dir / name
    path.mkdir()
    (path / "raylet.log").write_text("left")
    return path


@pytest.mark.parametrize("kind", ["ray", "run", "redis"])
def test_a_dead_process_directories_are_removed_and_named(temp_dir: Path, kind: str) -> None:
    path = make_dir(temp_dir, f"tandem-{kind}-{NO_PROCESS}-abc_1234")
    assert remove_leftovers([temp_dir]) == [path]
    assert not path.exists()


def test_what_belongs_to_a_living_process_or_to_others_stays(temp_dir: Path) -> None:
    own = make_temp_dir("run", parent=temp_dir)
    others = [make_dir(temp_dir, name) for name in ("tandem-notes", f"other-ray-{NO_PROCESS}-abc", "tandem-ray-x-abc")]
    assert remove_leftovers([temp_dir]) == []
    assert all(path.exists() for path in (own, *others))


def test_a_directory_in_which_somebody_listens_stays_whatever_its_process_is_called(temp_dir: Path) -> None:
    path = make_dir(temp_dir, f"tandem-ray-{NO_PROCESS}-abc")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path / "raylet"))
        server.listen()
        assert remove_leftovers([temp_dir]) == []
    assert remove_leftovers([temp_dir]) == [path]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_another_users_directory_stays(temp_dir: Path) -> None:
    path = make_dir(temp_dir, f"tandem-ray-{NO_PROCESS}-abc")
    os.chown(path, 65534, 65534)
    assert remove_leftovers([temp_dir]) == []
