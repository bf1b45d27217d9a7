"""The cluster's status as tables for people, and as plain data for programs."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table

from cluster.timeline import data_size
from cluster.watch_view import ROLES, pool_of
from tandem.rpc.tandem.v1.inference_pb2 import ClusterStatus, WorkerStatus


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


def print_status(status: ClusterStatus, console: Console) -> None:
    """Pools, workers and links."""
    console.print(f"model {status.model} · {status.num_running_requests} open requests", markup=False)
    console.print(_pool_table(status))
    console.print(_worker_table(status))
    if any(worker.links for worker in status.workers):
        console.print(_link_table(status))


def _blocks(workers: list[WorkerStatus]) -> tuple[str, str]:
    free = sum(w.num_free_blocks for w in workers)
    return str(free), str(sum(w.num_blocks for w in workers) - free)


def _pool_table(status: ClusterStatus) -> Table:
    counts = ("desired", "ready", "draining", "blocks free", "used", "running", "waiting")
    table = Table("pool", *counts, box=None, title_justify="left")
    for role in ROLES:
        workers, pool = [w for w in status.workers if w.role == role], pool_of(status, role)
        desired = str(pool.desired) if any(p.role == role for p in status.pools) else "-"
        running, waiting = sum(w.num_running for w in workers), sum(w.num_waiting for w in workers)
        states = (desired, str(pool.num_ready), str(pool.num_draining))
        table.add_row(role, *states, *_blocks(workers), str(running), str(waiting))
    return table


def _worker_table(status: ClusterStatus) -> Table:
    blocks = ("blocks free", "used", "running", "waiting", "handoffs")
    columns = ("worker", "state", "address", "process", "cores", *blocks)
    table = Table(*columns, box=None)
    for w in status.workers:
        cores = ",".join(map(str, w.cores)) or "any"
        counts = (str(w.num_running), str(w.num_waiting), str(w.num_handoffs))
        table.add_row(w.worker_id, w.state, w.address, str(w.pid), cores, *_blocks([w]), *counts)
    return table


def _link_table(status: ClusterStatus) -> Table:
    table = Table("link", "transport", "negotiated", "sent", "messages", "speed", box=None)
    for worker in status.workers:
        for link in worker.links:
            name = f"{worker.worker_id} → {link.peer_worker_id}"
            speed = f"{link.bytes_per_s / 1e9:.3g} GB/s" if link.bytes_per_s else "-"
            sent = data_size(link.num_bytes)
            table.add_row(name, link.transport, link.detail, sent, str(link.num_messages), speed)
    return table
