"""Pools that grow and shrink under load: how long it takes, and what it costs the requests that run meanwhile.

Each pool goes from one worker to three and back, ten times, while clients send one request after another. Every
answer must be the one that its prompt got before, no request may fail, and no block may be left in use.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.cluster_up import cluster_up
from benchmarks.load import Load, constant_load
from benchmarks.report import finish
from cluster.client import Client
from cluster.pool_wait import is_scaled
from tandem.rpc.tandem.v1.inference_pb2 import ClusterStatus
from tandem.types import Role

PROMPT_LENGTHS = (16, 48, 160)
MAX_TOKENS = 16
NUM_CLIENTS = 4
LARGE = 3
POLL_S = 0.05
CONFIG = {
    "transfer": {"transport": "shm"},
    "prefill": {"num_blocks": 256},
    "decode": {"num_blocks": 256},
}


@dataclass(kw_only=True, slots=True)
class Times:
    """Seconds of every growth (until all workers are ready) and of every shrinking (until the others are gone)."""

    grow_s: list[float] = field(default_factory=list)
    shrink_s: list[float] = field(default_factory=list)


def make_prompts() -> dict[str, list[int]]:
    """Token ids that mean nothing; what counts is that the same ones give the same answer."""
    return {f"tokens_{n}": [100 + (7 * i * i + 3 * n) % 20_000 for i in range(n)] for n in PROMPT_LENGTHS}


async def until(client: Client, condition: Callable[[ClusterStatus], bool]) -> ClusterStatus:
    """Asks until the condition holds."""
    while True:
        status = await client.status()
        if condition(status):
            return status
        await asyncio.sleep(POLL_S)


async def resize(client: Client, role: Role, size: int) -> float:
    """Seconds until the pool has the size."""
    began_s = time.monotonic()
    is_prefill = role is Role.PREFILL
    await client.set_pool_sizes(prefill=size if is_prefill else None, decode=None if is_prefill else size)
    await until(client, is_scaled([role]))
    return time.monotonic() - began_s


def num_leaked_blocks(status: ClusterStatus) -> int:
    """Blocks that are in use though nothing runs."""
    return sum(worker.num_blocks - worker.num_free_blocks for worker in status.workers)


def is_quiet(status: ClusterStatus) -> bool:
    """Whether nothing runs, waits or moves."""
    busy = any(worker.num_running or worker.num_waiting or worker.num_handoffs for worker in status.workers)
    return not busy and not status.num_running_requests


async def measure(endpoint: str, num_rounds: int) -> tuple[dict[Role, Times], Load, set[str], int]:
    """Times by pool, the load, prompts with a wrong answer, and leaked blocks."""
    prompts = make_prompts()
    async with constant_load(endpoint, prompts, num_clients=1, max_tokens=MAX_TOKENS) as before:
        await before.wait_for(len(prompts))
    times = {role: Times() for role in Role}
    async with Client(endpoint) as client:
        async with constant_load(endpoint, prompts, num_clients=NUM_CLIENTS, max_tokens=MAX_TOKENS) as load:
            for index in range(num_rounds):
                print(f"round {index + 1} of {num_rounds}: {len(load.errors)} failed requests so far", file=sys.stderr)
                for role in Role:
                    times[role].grow_s.append(await resize(client, role, LARGE))
                    await load.wait_for(2 * NUM_CLIENTS)
                    times[role].shrink_s.append(await resize(client, role, 1))
        status = await until(client, is_quiet)
    wrong = {name for name in prompts if load.tokens_of(name) != before.tokens_of(name)}
    return times, load, wrong, num_leaked_blocks(status)


def main() -> None:
    """Prints medians over all rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round instead of ten")
    parser.add_argument("--json", type=Path, help="write figures and ratios to this file")
    arguments = parser.parse_args()
    num_rounds = 1 if arguments.quick else 10
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as scratch, cluster_up(Path(scratch), CONFIG) as ready:
        times, load, wrong, num_leaked = asyncio.run(measure(ready["grpc"], num_rounds))
    figures = {"rounds": float(num_rounds), "requests": float(len(load.outcomes))}
    for role, taken in times.items():
        figures[f"{role} 1 to {LARGE}: ready (s)"] = statistics.median(taken.grow_s)
        figures[f"{role} {LARGE} to 1: drained and gone (s)"] = statistics.median(taken.shrink_s)
    figures["slowest request (s)"] = max(outcome.end_s - outcome.start_s for outcome in load.outcomes)
    figures |= {"failed requests": float(len(load.errors)), "prompts with another answer": float(len(wrong))}
    figures["leaked blocks"] = float(num_leaked)
    for error in load.errors:
        print(error)
    finish(figures, {}, arguments.json, "Pools that change under load")


if __name__ == "__main__":
    main()
