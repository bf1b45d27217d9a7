"""Generates the stubs of proto/ into tandem/rpc/tandem/v1 (`make proto`); with --check, says whether they are fresh."""

from __future__ import annotations

import filecmp
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "tandem" / "rpc" / "tandem" / "v1"


def generate(into: Path) -> None:
    """Runs protoc, then moves the generated imports under `tandem.rpc` (package `tandem.v1` is not importable)."""
    protos = sorted((ROOT / "proto").rglob("*.proto"))
    bin_dir = Path(sys.executable).parent
    plugins = [f"--plugin=protoc-gen-{name}={bin_dir / ('protoc-gen-' + name)}" for name in ("mypy", "mypy_grpc")]
    outs = [f"--{name}_out={into}" for name in ("python", "grpc_python", "mypy", "mypy_grpc")]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'proto'}", *plugins, *outs, *map(str, protos)]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    for path in (into / "tandem" / "v1").iterdir():
        text = path.read_text()
        text = re.sub(r"^from tandem\.v1 import", "from tandem.rpc.tandem.v1 import", text, flags=re.MULTILINE)
        text = re.sub(r"^import tandem\.v1\.(\w+)", r"import tandem.rpc.tandem.v1.\1", text, flags=re.MULTILINE)
        text = re.sub(r"\b(?<!rpc\.)tandem\.v1\.(\w+_pb2)\b", r"tandem.rpc.tandem.v1.\1", text)
        path.write_text(text)


def main() -> int:
    """Exit status 0 when written or fresh, 1 when stale."""
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh = Path(scratch) / "tandem" / "v1"
        names = sorted(p.name for p in fresh.iterdir())
        if "--check" in sys.argv:
            _, differing, missing = filecmp.cmpfiles(fresh, OUT, names, shallow=False)
            if differing or missing:
                print(f"stale stubs, run `make proto`: {', '.join(differing + missing)}")
                return 1
            return 0
        OUT.mkdir(parents=True, exist_ok=True)
        for name in names:
            (OUT / name).write_text((fresh / name).read_text())
        for package in (OUT, OUT.parent):
            (package / "__init__.py").touch()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
