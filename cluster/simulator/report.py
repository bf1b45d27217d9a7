"""A simulation's figures as tables for people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from cluster.simulator.plant import Plant
from cluster.simulator.splits import Split, best_of

_LATENCIES = (
    ("time to first token", "ttft"),
    ("time between tokens", "tbt"),
    ("wait for prefill", "queue"),
    ("prefill", "prefill"),
    ("transfer after prefill", "exposed"),
)


_SPLITS_WIDTH = 110
"""Of the table of cuts, on a narrower terminal too: lines that go on below say more than columns without text."""


def duration(seconds: float) -> str:
    """With three digits and a unit that suits; "-" for what there was none of."""
    if math.isnan(seconds):
        return "-"
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}" if seconds < 1000 else f"{seconds:.0f} s"
    return f"{seconds * 1e6:.2g} µs" if seconds else "0"


def print_plant(plant: Plant, console: Console) -> None:
    """What is simulated."""
    config, device, link = plant.config, plant.device, plant.link
    prefill, decode = config.prefill, config.decode
    weights = (
        f"{plant.model.weight_bytes / 1e9:.3g} GB of weights, {plant.model.token_bytes / 1024:.0f} KiB of KV a token"
    )
    console.print(f"{plant.model.name}: {weights}")
    rates = f"{device.flops_per_s / 1e12:.3g} TFLOP/s, {device.bytes_per_s / 1e12:.3g} TB/s"
    console.print(f"{device.name}: {rates}; links {link.bytes_per_s / 1e9:.3g} GB/s, {duration(link.latency_s)}")
    if max(prefill.tensor_parallel, decode.tensor_parallel) > 1:
        console.print(f"devices of a worker: {prefill.tensor_parallel} in prefill, {decode.tensor_parallel} in decode")
    console.print(
        f"blocks of {plant.block_size} tokens, {prefill.num_blocks} and {decode.num_blocks} a worker; "
        f"{prefill.max_batch_tokens} tokens a prefill iteration, {decode.max_batch_sequences} sequences a decode batch"
    )


def print_figures(figures: Mapping[str, float], console: Console) -> None:
    """One cluster's."""
    too_large, overloaded = figures["refused"] - figures["overloaded"], figures["overloaded"]
    console.print(
        f"{figures['requests']:.0f} requests in {duration(figures['duration_s'])}, "
        f"{too_large:.0f} refused as too large{f', {overloaded:.0f} as too many at once' if overloaded else ''}; "
        f"{figures['prompt_tokens_per_s']:.0f} prompt and {figures['output_tokens_per_s']:.0f} output tokens/s, "
        f"{100 * figures['cached_share']:.1f}% of prompt tokens cached"
    )
    table = _table("", "p50", "p90", "p99")
    for label, name in _LATENCIES:
        table.add_row(label, *(duration(figures[f"{name}_p{share}_s"]) for share in (50, 90, 99)))
    console.print(table)
    for pool in ("prefill", "decode", "colocated"):
        if f"{pool}_busy" in figures:
            rate = figures[f"{pool}_tokens_per_iteration"]
            console.print(
                f"{pool}: busy {100 * figures[f'{pool}_busy']:.0f}% of the time, {rate:.1f} tokens an iteration"
            )
    if figures["messages_per_handoff"]:
        console.print(
            f"KV: {figures['sent_gb']:.3g} GB in {figures['messages_per_handoff']:.1f} messages a handoff, "
            f"{100 * figures['held_share']:.1f}% held already and not sent"
        )
    if "slo_attained" in figures:
        console.print(
            f"within the promise: {100 * figures['slo_attained']:.1f}%, {figures['goodput_per_s']:.2f} requests/s"
        )


def print_splits(splits: Sequence[Split], console: Console) -> None:
    """Every cut, and which is best."""
    table = _table("prefill + decode", "TTFT p50", "p90", "TBT p50", "p99", "within the promise", "goodput/s")
    for split in splits:
        figures = split.figures
        table.add_row(
            split.label,
            *(duration(figures[name]) for name in ("ttft_p50_s", "ttft_p90_s", "tbt_p50_s", "tbt_p99_s")),
            f"{100 * figures['slo_attained']:.1f}%",
            f"{figures['goodput_per_s']:.2f}",
        )
    console.width = max(console.width, _SPLITS_WIDTH)
    console.print(table)
    console.print(_verdict(splits), soft_wrap=True)


def _verdict(splits: Sequence[Split]) -> str:
    best = best_of(splits)
    what = "one pool of workers that do both" if best.is_colocated else f"{best.label} workers"
    equals = [split for split in splits if split.figures["slo_attained"] == best.figures["slo_attained"]]
    if len(equals) == 1:
        return f"most requests within the promise: {what}"
    return (
        f"{len(equals)} of {len(splits)} cuts keep the promise equally often: more requests (--rate) or a shorter "
        f"promise would tell them apart. Of these, lowest p99 between tokens: {what}"
    )


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(columns[0], no_wrap=True)
    for column in columns[1:]:
        table.add_column(column, justify="right", no_wrap=True)
    return table
