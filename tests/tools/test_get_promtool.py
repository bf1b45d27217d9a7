"""promtool out of a package of the distribution, without installing it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tools.get_promtool import extract


@pytest.fixture
def package(tmp_path: Path) -> Path:
    if shutil.which("dpkg-deb") is None:
        pytest.skip("no dpkg-deb here")
    root = tmp_path / "package"
    (root / "DEBIAN").mkdir(parents=True)
    (root / "DEBIAN" / "control").write_text(
        "Package: prometheus\nVersion: 1\nArchitecture: all\nMaintainer: nobody <n@example.com>\nDescription: none\n"
    )
    (root / "usr" / "bin").mkdir(parents=True)
    (root / "usr" / "bin" / "promtool").write_text("#!/bin/sh\necho yes\n")
    (root / "usr" / "bin" / "promtool").chmod(0o755)
    subprocess.run(["dpkg-deb", "--build", root, tmp_path / "p.deb"], check=True, stdout=subprocess.DEVNULL)
    return tmp_path / "p.deb"


def test_the_program_of_a_package_can_be_run_from_the_tools_directory(package: Path, tmp_path: Path) -> None:
    extract(package, tmp_path / "tools" / "bin")
    told = subprocess.run([tmp_path / "tools" / "bin" / "promtool"], check=True, capture_output=True, text=True)
    assert told.stdout == "yes\n"


def test_a_package_without_the_program_is_an_error(package: Path, tmp_path: Path) -> None:
    root = tmp_path / "package"
    (root / "usr" / "bin" / "promtool").unlink()
    subprocess.run(["dpkg-deb", "--build", root, package], check=True, stdout=subprocess.DEVNULL)
    with pytest.raises(FileNotFoundError):
        extract(package, tmp_path / "tools" / "bin")
