"""The check that tests leave nothing behind finds what is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.processes import make_temp_dir
from tests import conftest


def snapshot() -> tuple[set[object], set[str], set[Path]]:
    return set(conftest.children()), conftest.segments(), conftest.directories()


def test_nothing_new_is_nothing_left() -> None:
    assert conftest.left_over(snapshot()) == []


def test_a_living_child_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "GRACE_S", 0.1)
    before = snapshot()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        found = conftest.left_over(before)
        child.kill()
    assert [line.split(":")[0] for line in found] == [f"process {child.pid}"]


def test_a_directory_is_found() -> None:
    before = snapshot()
    path = make_temp_dir("run")
    found = conftest.left_over(before)
    path.rmdir()
    assert found == [f"directory {path}"]


@pytest.mark.skipif(not conftest.SHARED_MEMORY.is_dir(), reason="no /dev/shm here")
def test_a_shared_memory_segment_is_found() -> None:
    before = snapshot()
    segment = conftest.SHARED_MEMORY / f"tandem-test-{os.getpid()}"
    segment.write_bytes(b"left")
    found = conftest.left_over(before)
    segment.unlink()
    assert found == [f"shared memory {segment.name}"]


@pytest.mark.skipif(not conftest.SHARED_MEMORY.is_dir(), reason="no /dev/shm here")
def test_a_segment_that_goes_while_its_owner_is_looked_for_is_nobody_s() -> None:
    segment = conftest.SHARED_MEMORY / f"tandem-test-{os.getpid()}"
    segment.write_bytes(b"left")
    seen = conftest.segments()
    segment.unlink()
    assert segment.name not in conftest.lasting(seen & {segment.name})


@pytest.mark.skipif(not conftest.SHARED_MEMORY.is_dir(), reason="no /dev/shm here")
def test_a_segment_is_its_owner_s_as_long_as_that_lives() -> None:
    """One that is named after a process which is not below ours, and that nobody has mapped."""
    before = snapshot()
    segment = conftest.SHARED_MEMORY / f"tandem-test-{os.getppid()}"
    segment.write_bytes(b"theirs")
    found = conftest.left_over(before)
    segment.unlink()
    assert found == []


@pytest.mark.skipif(not conftest.SHARED_MEMORY.is_dir(), reason="no /dev/shm here")
def test_a_segment_of_a_process_that_has_ended_is_found() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    before = snapshot()
    segment = conftest.SHARED_MEMORY / f"tandem-test-{ended.pid}"
    segment.write_bytes(b"left")
    found = conftest.left_over(before)
    segment.unlink()
    assert found == [f"shared memory {segment.name}"]
