"""Puts Prometheus' `promtool` into a directory's `bin`: `python -m tools.get_promtool DIRECTORY`. Debian and its kin.

apt fetches the distribution's package `prometheus`, signed as all of them; it is unpacked and not installed, so nobody
needs to be root.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE, PROGRAM = "prometheus", "promtool"
_NEEDS = ("apt-get", "dpkg-deb")


def download(into: Path) -> Path:
    """The package. Raises CalledProcessError when apt knows none, or cannot fetch it."""
    own_user = ["--option", "APT::Sandbox::User=root"] if os.geteuid() == 0 else []  # apt's own cannot write to `into`
    subprocess.run(["apt-get", "--quiet", "--quiet", *own_user, "download", PACKAGE], cwd=into, check=True)
    return next(into.glob("*.deb"))


def extract(package: Path, target: Path) -> None:
    """Puts the program into the directory `target`. Raises CalledProcessError, or FileNotFoundError without it."""
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(["dpkg-deb", "--extract", str(package), scratch], check=True)
        target.mkdir(parents=True, exist_ok=True)
        shutil.move(Path(scratch) / "usr" / "bin" / PROGRAM, target / PROGRAM)


def main() -> int:
    """Exit status 1 where there is no apt, or it has no such package."""
    parser = argparse.ArgumentParser(description="Fetch promtool.")
    parser.add_argument("directory", type=Path)
    target = parser.parse_args().directory / "bin"
    if (target / PROGRAM).exists() or shutil.which(PROGRAM):
        return 0
    missing = [name for name in _NEEDS if shutil.which(name) is None]
    if missing:
        print(f"promtool is fetched with {missing[0]}, which is not here; put your own into {target}", file=sys.stderr)
        return 1
    try:
        with tempfile.TemporaryDirectory() as scratch:
            extract(download(Path(scratch)), target)
    except subprocess.CalledProcessError as exc:
        print(f"promtool could not be fetched: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
