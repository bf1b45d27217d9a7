"""What `tandem cache` shows people: tables and a line for each thing that was done."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console

from cluster.short_ids import short_ids
from cluster.tables import fitting_tables
from cluster.timeline import data_size
from router.cache_reports import NO_STORES, NOT_KEPT
from tandem.rpc.tandem.v1 import inference_pb2

DISK_SIZE = "disk: what blocks may take; the rest of prefix_store.disk_bytes is room to empty files and write them anew"


def print_stats(stats: inference_pb2.CacheStats, console: Console) -> None:
    """The nodes' tiers, then the workers' own blocks."""
    if not stats.is_enabled or not stats.has_stores:
        console.print(NO_STORES if stats.is_enabled else NOT_KEPT, soft_wrap=True)
    if stats.nodes:
        _print_tiers(stats.nodes, console)
        if any(tier.tier == "disk" for node in stats.nodes for tier in node.tiers):
            console.print(DISK_SIZE, style="dim")
    elif stats.has_stores:
        console.print("no prefix store is there yet")
    short = short_ids(node.node for node in stats.nodes)
    for node in stats.nodes:
        if node.error:
            console.print(f"{short[node.node]}: {node.error}", markup=False, soft_wrap=True)
    _print_workers(stats.workers, console)


def _print_table(console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]], *, num_names: int) -> None:
    for table in fitting_tables(console.width, columns, rows, num_names=num_names):
        console.print(table, markup=False)


def _print_tiers(nodes: Sequence[inference_pb2.NodeCache], console: Console) -> None:
    short = short_ids(node.node for node in nodes)
    columns = ("node", "tier", "blocks", "size", "pinned", "hits", "misses", "hit rate", "evicted", "damaged")
    rows = [(short[node.node], *_tier_row(tier)) for node in nodes for tier in node.tiers]
    _print_table(console, columns, rows, num_names=2)


def _tier_row(tier: inference_pb2.TierCache) -> tuple[str, ...]:
    wanted = tier.num_hits + tier.num_misses
    return (
        tier.tier,
        f"{tier.num_blocks}/{tier.capacity_blocks}" if tier.capacity_blocks else "-",
        f"{data_size(tier.num_bytes)}/{data_size(tier.capacity_bytes)}" if tier.capacity_blocks else "-",
        str(tier.num_pinned),
        str(tier.num_hits),
        str(tier.num_misses),
        f"{tier.num_hits / wanted:.0%}" if wanted else "-",
        str(tier.num_evictions),
        str(tier.num_damaged),
    )


def _print_workers(workers: Iterable[inference_pb2.WorkerCache], console: Console) -> None:
    columns = ("worker", "state", "named", "cached", "blocks", "evicted", "to store", "left out")
    _print_table(console, columns, [_worker_row(worker) for worker in workers], num_names=1)


def _worker_row(worker: inference_pb2.WorkerCache) -> tuple[str, ...]:
    device = worker.device
    counts = (device.num_named_blocks, device.num_cached_blocks, worker.num_blocks, device.num_evictions)
    left_out = device.num_dropped_blocks + device.num_refused_blocks
    shown = [str(count) for count in (*counts, device.num_written_blocks, left_out)]
    return (worker.worker_id, worker.state, *(shown if worker.HasField("device") else ["-"] * len(shown)))


def print_prefixes(answer: inference_pb2.CachedPrefixes, console: Console) -> None:
    """A row for each. `loads` counts how often it was read from there: a worker that has it itself need not.

    The tenant is the hash of its salt.
    """
    if answer.prefixes:
        short = short_ids(node for prefix in answer.prefixes for node in prefix.nodes)
        rows = [_prefix_row(prefix, short) for prefix in answer.prefixes]
        _print_table(console, ("block", "tokens", "loads", "pinned", "tenant", "nodes"), rows, num_names=1)
    else:
        console.print("no node's memory has a prefix now")
    failed = short_ids(node.node for node in answer.failures)
    for node in answer.failures:
        console.print(f"{failed[node.node]} did not answer: {node.error}", markup=False, soft_wrap=True)


def _prefix_row(prefix: inference_pb2.CachedPrefix, short: Mapping[str, str]) -> tuple[str, ...]:
    pinned, tokens = "yes" if prefix.is_pinned else "", str(prefix.num_tokens or "-")
    nodes = ", ".join(short[node] for node in prefix.nodes)
    return (prefix.block, tokens, str(prefix.num_uses), pinned, prefix.tenant, nodes)


def print_pinned(answer: inference_pb2.PrefixAnswer, console: Console) -> None:
    """A line for each node that has some of it."""
    _print_prefix(answer, console, what="pinned")


def print_unpinned(answer: inference_pb2.PrefixAnswer, console: Console) -> None:
    """A line for each node that had some of it pinned."""
    _print_prefix(answer, console, what="unpinned")


def _print_prefix(answer: inference_pb2.PrefixAnswer, console: Console, *, what: str) -> None:
    of = f" of {answer.num_blocks}" if answer.num_blocks else ""
    short = short_ids(node.node for node in answer.nodes)
    for node in answer.nodes:
        if node.num_blocks:
            console.print(f"{short[node.node]}: {what} {node.num_blocks}{of} blocks", markup=False, soft_wrap=True)


def print_cleared(answer: inference_pb2.ClearCacheAnswer, console: Console) -> None:
    """A line for each node and worker."""
    short = short_ids(node.node for node in answer.nodes)
    done = [(short[node.node], node.num_blocks, node.error) for node in answer.nodes]
    done += [(worker.worker_id, worker.num_blocks, worker.error) for worker in answer.workers]
    for name, num_blocks, error in done:
        if not error:
            console.print(f"{name}: forgot {num_blocks} blocks", markup=False, soft_wrap=True)


def print_verified(answer: inference_pb2.VerifyCacheAnswer, console: Console) -> None:
    """A line for each node."""
    short = short_ids(node.node for node in answer.nodes)
    for node in answer.nodes:
        if not node.error:
            found = f"{node.num_damaged} damaged, removed" if node.num_damaged else "all whole"
            console.print(f"{short[node.node]}: read {node.num_checked} blocks, {found}", markup=False, soft_wrap=True)
