"""How long it takes from `tandem up` to ready, where that time goes, and how soon the first token comes after it.

Starts the whole cluster (Redis, Ray, one worker in each pool, the router) as a user does, with the model cached.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from benchmarks.report import finish
from cluster.client import Client, make_sampling

READY_TARGET_S = 30.0
FIRST_TOKEN_TARGET_S = 1.0
PROMPT = "The capital of France is"


async def first_token_s(endpoint: str) -> float:
    """Seconds from sending a short prompt to its first token."""
    async with Client(endpoint) as client:
        started_s = time.perf_counter()
        async for step in client.generate(PROMPT, make_sampling(max_tokens=8, temperature=0.0)):
            if step.token_ids:
                return time.perf_counter() - started_s
    raise RuntimeError("no token came")


def one_start(directory: Path) -> dict[str, Any]:
    """Starts and stops a cluster once: ready_s, first_token_s, stop_s, and the launcher's own phases."""
    config, ready_file = directory / "config.yaml", directory / "ready.json"
    config.write_text(yaml.safe_dump({"router": {"grpc_port": 0, "http_port": 0}}))
    ready_file.unlink(missing_ok=True)
    tandem = str(Path(sys.executable).parent / "tandem")
    command = [tandem, "up", "--config", str(config), "--ready-file", str(ready_file)]
    started_s = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            while not ready_file.exists():
                if process.poll() is not None:
                    raise RuntimeError(f"`tandem up` ended with status {process.returncode}")
                time.sleep(0.02)
            ready_s = time.perf_counter() - started_s
            ready = json.loads(ready_file.read_text())
            token_s = asyncio.run(first_token_s(ready["grpc"]))
        finally:
            stopped_s = time.perf_counter()
            process.send_signal(signal.SIGTERM)
            process.wait()
    stop_s = time.perf_counter() - stopped_s
    return {"ready_s": ready_s, "first_token_s": token_s, "stop_s": stop_s, "phases": phases_of(ready)}


def phases_of(ready: dict[str, Any]) -> dict[str, float]:
    """Seconds of every phase in a ready file: the launcher's (they overlap), the router's and the workers' own."""
    phases = {phase["name"]: phase["end_s"] - phase["start_s"] for phase in ready["startup"]}
    phases |= {f"router: {name}": took_s for name, took_s in ready["router_startup"].items()}
    for worker in ready["workers"]:
        phases |= {f"{worker['worker_id']}: {name}": took_s for name, took_s in worker["startup"].items()}
    return phases


def main() -> None:
    """Prints the medians over all starts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one start instead of three")
    parser.add_argument("--json", type=Path, help="write figures and ratios to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as scratch:
        starts = [one_start(Path(scratch)) for _ in range(1 if arguments.quick else 3)]
    figures = {name: statistics.median(s[name] for s in starts) for name in ("ready_s", "first_token_s", "stop_s")}
    for phase in starts[0]["phases"]:
        figures[f"{phase} (s)"] = statistics.median(s["phases"][phase] for s in starts)
    ratios = {
        "ready_over_30s": figures["ready_s"] / READY_TARGET_S,
        "first_token_over_1s": figures["first_token_s"] / FIRST_TOKEN_TARGET_S,
    }
    finish(figures, ratios, arguments.json, "Start-up, model cached")


if __name__ == "__main__":
    main()
