"""What the prefix store saves: time to first token of a prompt found in each tier, and of a conversation.

    python -m benchmarks.store [--quick] [--directory DIR] [--json FILE]

Real weights, two nodes as processes, each a store and a prefill worker. Every round has prompts of its own: computed
cold, then asked again while the worker has it, when only its node's memory has, when only the disk has (the store was
killed), and at the other node. A ratio is the median of the rounds' own; every answer must be the cold one's. With
`fio` installed, `disk_read_vs_fio` comes from `benchmarks.disk_tier` in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import secrets
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks import disk_tier
from benchmarks.report import finish
from benchmarks.store_nodes import Asked, Nodes
from tandem.config import from_mapping
from tandem.key_source import hand_down
from tandem.secret import ClusterKey

PROMPT_TOKENS = 2000
NUM_BLOCKS = 132
"""Of each worker: one prompt and no second."""
TIERS = ("device", "host", "disk", "remote")
NUM_TURNS = 10
FIRST_TOKENS, TURN_TOKENS = 200, 150
CONFIG = {
    "cluster": "bench-store",
    "transfer": {"transport": "shm"},
    "model": {"max_context_tokens": 2112},
    "prefill": {"num_blocks": NUM_BLOCKS, "num_threads": 1},
    "decode": {"num_blocks": NUM_BLOCKS},
    "prefix_store": {"host_bytes": 1 << 30, "disk_bytes": 4 << 30, "disk_path": "/set/by/node"},
}


@dataclass(kw_only=True, slots=True)
class Times:
    """Seconds to the first token by tier, round by round."""

    by_tier: dict[str, list[float]] = field(default_factory=lambda: {tier: [] for tier in ("cold", *TIERS)})
    cached: dict[str, list[int]] = field(default_factory=lambda: {tier: [] for tier in TIERS})

    def book(self, tier: str, asked: Asked) -> None:
        """One answer."""
        self.by_tier[tier].append(asked.ttft_s)
        if tier in self.cached:
            self.cached[tier].append(asked.num_cached)

    def ratio(self, tier: str) -> float:
        """Over the same round's cold one."""
        return median(t / cold for t, cold in zip(self.by_tier[tier], self.by_tier["cold"], strict=True))


def make_prompt(num_tokens: int, seed: int) -> list[int]:
    """Token ids that mean nothing and are shared with no other seed."""
    drawn = random.Random(seed)
    return [drawn.randrange(1000, 40_000) for _ in range(num_tokens)]


async def one_round(nodes: Nodes, number: int, times: Times) -> None:
    """All tiers, one after another."""
    here, there = nodes.names
    prompt = make_prompt(PROMPT_TOKENS, 10 * number)
    cold = await nodes.ask(here, prompt)
    times.book("cold", cold)
    answers = [await _again(nodes, here, prompt, "device", times)]
    await nodes.until_held(here, prompt, "host")
    await nodes.ask(here, make_prompt(PROMPT_TOKENS, 10 * number + 1))  # takes the worker's blocks
    answers.append(await _again(nodes, here, prompt, "host", times))
    await nodes.until_on_disk(here)
    other = make_prompt(PROMPT_TOKENS, 10 * number + 2)
    await nodes.ask(here, other)
    await nodes.until_held(here, other, "host")
    await nodes.kill_store(here)
    answers.append(await _again(nodes, here, prompt, "disk", times))
    await nodes.until_held(there, prompt, "remote")
    answers.append(await _again(nodes, there, prompt, "remote", times))
    if answers != [cold.token_id] * len(TIERS):
        raise SystemExit(f"a cached prompt had another answer: {answers}, computed {cold.token_id}")


async def _again(nodes: Nodes, node: str, prompt: Sequence[int], tier: str, times: Times) -> int:
    asked = await nodes.ask(node, prompt)
    times.book(tier, asked)
    return asked.token_id


async def conversation(nodes: Nodes, seed: int, *, cached: bool) -> float:
    """Seconds to the first tokens of all turns together."""
    text = make_prompt(FIRST_TOKENS + (NUM_TURNS - 1) * TURN_TOKENS, seed)
    lengths = range(FIRST_TOKENS, len(text) + 1, TURN_TOKENS)
    return sum([(await nodes.ask(nodes.names[0], text[:length], cached=cached)).ttft_s for length in lengths])


async def beside_write_back(nodes: Nodes, seed: int, *, cached: bool) -> float:
    """Seconds of a prompt that is computed while the one before it goes to the store; if not `cached`, nothing goes."""
    await nodes.ask(nodes.names[0], make_prompt(PROMPT_TOKENS, seed), cached=cached)
    return (await nodes.ask(nodes.names[0], make_prompt(PROMPT_TOKENS, seed + 1), cached=cached)).ttft_s


async def measure(directory: Path, *, num_rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Figures and ratios."""
    key = ClusterKey(secrets.token_bytes(32))
    hand_down(key)
    times = Times()
    async with Nodes(config=from_mapping(CONFIG), names=("n0", "n1"), disk=directory, key=key) as nodes:
        for node in nodes.names:
            await nodes.ask(node, make_prompt(64, 999), cached=False)
        for number in range(1, num_rounds + 1):
            await one_round(nodes, number, times)
        turns = [
            [await conversation(nodes, 100_000 + number, cached=cached) for cached in (False, True)]
            for number in range(num_rounds)
        ]
        beside = [
            [
                await beside_write_back(nodes, 200_000 + 10 * number + 2 * cached, cached=cached)
                for cached in (False, True)
            ]
            for number in range(num_rounds)
        ]
    figures = {f"ttft {tier} (ms)": 1000 * median(values) for tier, values in times.by_tier.items()}
    figures |= {f"tokens not computed, {tier}": float(median(values)) for tier, values in times.cached.items()}
    figures["10 turns without a store (ms)"] = 1000 * median(without for without, _ in turns)
    figures["10 turns with it (ms)"] = 1000 * median(with_store for _, with_store in turns)
    ratios = {f"ttft_{tier}_over_cold": times.ratio(tier) for tier in TIERS}
    ratios["multi_turn_vs_no_store"] = median(with_store / without for without, with_store in turns)
    ratios["compute_beside_write_back"] = median(with_store / without for without, with_store in beside)
    return figures, ratios


def main(arguments: list[str] | None = None) -> int:
    """Prints a table; writes JSON where asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.store", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--directory", type=Path, default=None, help="where the disk tiers are")
    parser.add_argument("--json", type=Path, default=None, help="where to write figures and ratios")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="tandem-store-") as directory:
        figures, ratios = asyncio.run(measure(Path(directory), num_rounds=1 if options.quick else 3))
    disk_figures, disk_ratios = disk_tier.measure(options.quick)
    finish({**figures, **disk_figures}, {**ratios, **disk_ratios}, options.json, "Prefix store")
    return 0


if __name__ == "__main__":
    sys.exit(main())
