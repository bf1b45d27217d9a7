"""The cluster's status as tables for people, 60 columns or more, and as plain data for programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table

from cluster.tables import WIDE, make_table
from cluster.timeline import data_size
from cluster.watch_view import ROLES, headline, pool_of, short_transport, state_of, unplaced
from tandem.rpc.tandem.v1.inference_pb2 import ClusterStatus, WorkerStatus

_FEWEST_CHARS = 8
_SPEEDS: tuple[tuple[int, tuple[str, ...], int], ...] = (
    (100, ("probed GB/s", "moved GB/s", "probed µs"), 57),
    (WIDE, ("probed", "moved", "µs"), 46),
    (0, ("GB/s*", "µs*"), 40),
)
"""Columns of the console, those of the link table that say how quick a link is (*: probed), and what a row of it needs
beside names and transport."""


def as_data(message: Message) -> dict[str, Any]:
    """The message as plain data: names as in the .proto file, numbers as numbers, absent messages left out."""
    data: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.has_presence and not message.HasField(field.name):
            continue
        value = getattr(message, field.name)
        if field.is_repeated:
            data[field.name] = [as_data(item) if isinstance(item, Message) else item for item in value]
        else:
            data[field.name] = as_data(value) if isinstance(value, Message) else value
    return data


def print_status(status: ClusterStatus, console: Console, *, verbose: bool = False) -> None:
    """Pools, workers and links; `verbose` adds where workers run and all that the transports negotiated."""
    console.print(headline(status), soft_wrap=True)
    for waiting in unplaced(status):
        console.print(waiting, style="yellow", soft_wrap=True)
    console.print(_pool_table(status, console.width))
    console.print(_worker_table(status, console.width))
    if any(worker.links for worker in status.workers):
        console.print(_link_table(status, console.width))
    if verbose:
        for line in _details(status):
            console.print(line, markup=False, soft_wrap=True)


def _blocks(workers: list[WorkerStatus]) -> str:
    total = sum(w.num_blocks for w in workers)
    return f"{total - sum(w.num_free_blocks for w in workers)}/{total}"


def _pool_table(status: ClusterStatus, width: int) -> Table:
    table = make_table(width, "pool", "desired", "ready", "draining", "blocks", "run", "wait")
    for role in ROLES:
        workers, pool = [w for w in status.workers if w.role == role], pool_of(status, role)
        desired = str(pool.desired) if any(p.role == role for p in status.pools) else "-"
        running, waiting = sum(w.num_running for w in workers), sum(w.num_waiting for w in workers)
        states = (desired, str(pool.num_ready), str(pool.num_draining))
        table.add_row(role, *states, _blocks(workers), str(running), str(waiting))
    return table


def _worker_table(status: ClusterStatus, width: int) -> Table:
    table = make_table(width, "worker", "state", "blocks", "run", "wait", "KV", "address")
    for w in status.workers:
        counts = (_blocks([w]), str(w.num_running), str(w.num_waiting))
        table.add_row(w.worker_id, state_of(w), *counts, w.transport or "-", w.address or "-")
    return table


def _link_table(status: ClusterStatus, width: int) -> Table:
    """What was probed, with a large and a small message, when the link was opened; and what requests moved so far, by
    the time in which a message was under way: with little traffic, that is mostly waiting for the next layer.
    """
    columns, taken = next((columns, taken) for least, columns, taken in _SPEEDS if width >= least)
    table = make_table(width, "link", "over", "sent", "msgs", *columns)
    for worker in status.workers:
        for link in worker.links:
            name = f"{worker.worker_id} → {link.peer_worker_id}"
            probed = f"{link.probed_bytes_per_s / 1e9:.3g}" + ("!" if link.slow else "")
            moved = f"{link.bytes_per_s / 1e9:.2g}" if link.bytes_per_s else "-"
            over = short_transport(link, max(_FEWEST_CHARS, width - len(name) - taken))
            latency = f"{link.latency_s * 1e6:.0f}"
            speeds = (probed, moved, latency) if len(columns) > 2 else (probed, latency)
            table.add_row(name, over, data_size(link.num_bytes), str(link.num_messages), *speeds)
    return table


def _details(status: ClusterStatus) -> Iterator[str]:
    for w in status.workers:
        cores = ",".join(map(str, w.cores)) or "any"
        at = f" on {w.node}" if w.node else ""
        yield f"{w.worker_id}: process {w.pid}{at}, cores {cores}, {w.num_handoffs} handoffs, {w.metrics_url}"
        yield f"{w.worker_id}: computes on {w.compute or 'what it did not say'}"
        for link in w.links:
            busy = f"moved {link.bytes_per_s / 1e9:.3g} GB/s while busy" if link.bytes_per_s else "not used yet"
            yield f"{w.worker_id} → {link.peer_worker_id}: {link.transport} negotiated {link.detail}; {busy}"
