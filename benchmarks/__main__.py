"""`python -m benchmarks [NAME ...] [--quick] [--json-dir DIR]`: benchmarks, each in its own process."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

NAMES = (
    "engine",
    "fairness",
    "transfer",
    "ranks",
    "store",
    "conversations",
    "startup",
    "scaling",
    "recovery",
    "simulator",
)


def _name(text: str) -> str:
    if text not in NAMES:
        raise argparse.ArgumentTypeError(f"no benchmark {text!r}; there are {', '.join(NAMES)}")
    return text


def main() -> int:
    """Exit status 0 when all ran."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", type=_name, metavar="NAME", help=f"{', '.join(NAMES)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="few rounds, small sizes")
    parser.add_argument("--json-dir", type=Path, help="write NAME.json files into this directory")
    arguments = parser.parse_args()
    failed = []
    for name in arguments.names or NAMES:
        command = [sys.executable, "-m", f"benchmarks.{name}", *(["--quick"] if arguments.quick else [])]
        if arguments.json_dir is not None:
            command += ["--json", str(arguments.json_dir / f"{name}.json")]
        if subprocess.run(command, check=False).returncode != 0:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
