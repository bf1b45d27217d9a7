"""Which eviction policy keeps most of a real workload's prefixes: a production trace through the real directory.

Replays `mooncake_conversation_trace.jsonl` (one line a request: `timestamp` in ms, `hash_ids`, an id for each 512-token
block of the prompt) at several sizes, and compares LRU and LRFU with what could be had at best: the same directory with
Belady's rule, which sees the future and evicts the leaf that is used again last. Deterministic: no clock is involved.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import finish
from tandem.kv.eviction import EvictionPolicy, Lrfu, Lru
from tandem.kv.prefix_directory import PrefixDirectory
from tandem.types import BlockHash

SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Sizes, as shares of all distinct blocks."""
HALF_LIVES = (0.2, 0.5, 0.8, 1.2)
"""Turnovers."""
NEVER = 1 << 62
TRACE = Path("../shared/data/mooncake_conversation_trace.jsonl")


Prompt = tuple[BlockHash, ...]


def read_trace(path: Path) -> list[Prompt]:
    """The blocks of every request's prompt, in order of arrival."""
    lines = (json.loads(line) for line in path.read_text().splitlines())
    return [tuple(name_of(number) for number in line["hash_ids"]) for line in lines]


def name_of(number: int) -> BlockHash:
    """A block's name from its number in the trace."""
    return BlockHash(number.to_bytes(16, "little"))


class Belady:
    """Sees the future: the sooner a block is used again, the longer it stays. Whoever replays sets `number`."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self.number = 0
        self._next_use: dict[tuple[BlockHash, int], int] = {}
        last: dict[BlockHash, int] = {}
        for number in range(len(prompts) - 1, -1, -1):
            for name in prompts[number]:
                self._next_use[name, number] = last.get(name, NEVER)
                last[name] = number

    def used(self, name: BlockHash, *, before: float | None, now: float) -> float:
        """Minus the number of the request that uses it next."""
        return -float(self._next_use[name, self.number])


def hit_rate(prompts: Sequence[Prompt], capacity: int, policy: EvictionPolicy) -> float:
    """Share of all prompt blocks that were there when their request came."""
    directory = PrefixDirectory(capacity, policy)
    num_hit = 0
    for number, prompt in enumerate(prompts):
        if isinstance(policy, Belady):
            policy.number = number
        num_hit += directory.use(prompt)
        directory.insert(prompt)
    return num_hit / sum(len(prompt) for prompt in prompts)


def replay(prompts: Sequence[Prompt], capacity: int) -> dict[str, float]:
    """Hit rate of every policy at one size."""
    rates = {"lru": hit_rate(prompts, capacity, Lru())}
    for half_life in HALF_LIVES:
        rates[f"lrfu_{half_life:g}"] = hit_rate(prompts, capacity, Lrfu(half_life))
    return rates | {"belady": hit_rate(prompts, capacity, Belady(prompts))}


def plot(path: Path, shares: Sequence[float], rates: Sequence[dict[str, float]], at_best: float) -> None:
    """Hit rate over size, a line for each policy."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2))
    for name in rates[0]:
        style = {"belady": "k--", "lru": "C7-"}.get(name, "-")
        axes.plot(shares, [100 * rate[name] for rate in rates], style, marker="o", markersize=3, label=name)
    axes.axhline(100 * at_best, color="grey", linewidth=0.8, label="without a limit")
    axes.set_xscale("log")
    axes.set_xticks(shares, [f"{100 * share:g}%" for share in shares])
    axes.minorticks_off()
    axes.set_xlabel("size, in shares of all distinct blocks of the trace")
    axes.set_ylabel("prompt blocks that hit (%)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Prints hit rates, and each policy's share of what Belady's rule reaches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=TRACE, help=f"the trace (default: {TRACE})")
    parser.add_argument("--quick", action="store_true", help="two sizes instead of six")
    parser.add_argument("--plot", type=Path, help="draw the hit rates into this SVG file")
    parser.add_argument("--json", type=Path, help="write figures and ratios to this file")
    arguments = parser.parse_args()
    prompts = read_trace(arguments.trace)
    num_distinct = len({name for prompt in prompts for name in prompt})
    shares = SHARES[2:4] if arguments.quick else SHARES
    rates = [replay(prompts, int(share * num_distinct)) for share in shares]
    at_best = hit_rate(prompts, num_distinct, Lru())
    figures = {"requests": float(len(prompts)), "distinct blocks": float(num_distinct), "hit rate, no limit": at_best}
    ratios: dict[str, float] = {}
    for share, rate in zip(shares, rates, strict=True):
        size = f"{100 * share:g}"
        figures |= {f"hit rate at {size}%, {name}": value for name, value in rate.items()}
        ratios |= {f"{name}_vs_belady_{size}": rate[name] / rate["belady"] for name in rate if name != "belady"}
    if arguments.plot is not None:
        plot(arguments.plot, shares, rates, at_best)
    finish(figures, ratios, arguments.json, "Eviction on a production trace")


if __name__ == "__main__":
    main()
