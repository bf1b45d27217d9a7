"""`python -m benchmarks [NAME ...] [--quick] [--json-dir DIR]`: benchmarks, each in its own process.

Without names all of them; those that replay a trace are left out, with a word, where it is not.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.eviction import TRACE

NAMES = (
    "engine",
    "fairness",
    "transfer",
    "ranks",
    "store",
    "disk_tier",
    "eviction",
    "segments",
    "conversations",
    "startup",
    "scaling",
    "recovery",
    "simulator",
)
REPLAYS = ("eviction", "segments")
"""Those that replay `benchmarks.eviction.TRACE`."""


def to_run(named: Sequence[str], *, has_trace: bool) -> list[str]:
    """Those that are named, whatever they need; without names all that can be run here."""
    return list(named) or [name for name in NAMES if has_trace or name not in REPLAYS]


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
    names = to_run(arguments.names, has_trace=TRACE.exists())
    if not arguments.names and len(names) < len(NAMES):
        print(f"left out, there is no {TRACE}: {', '.join(REPLAYS)}; each takes --trace FILE", file=sys.stderr)
    for name in names:
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
