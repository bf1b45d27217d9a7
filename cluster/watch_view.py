"""What `tandem status --watch` shows of two looks at the cluster: tables for a terminal, one line elsewhere.

Rates are differences between the two looks; a worker that was started again in between, or is new, has none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cluster.timeline import data_size, plural
from tandem.rpc.tandem.v1.inference_pb2 import ClusterStatus, LinkStatus, PoolStatus, WorkerStatus

ROLES = ("prefill", "decode")
_BAR_CHARS = 20
_TRANSPORT_CHARS = 28
_FULL = 0.9
"""Share of used blocks from which a bar is red."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """One answer of a router, and when it came (seconds on the watcher's clock)."""

    status: ClusterStatus
    at_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Per second between two looks, by worker and by (worker, peer)."""

    tokens: dict[str, float]
    link_bytes: dict[tuple[str, str], float]

    def of_pool(self, workers: Sequence[WorkerStatus]) -> float | None:
        """Tokens per second of these workers together; None when none of them has a rate."""
        known = [self.tokens[w.worker_id] for w in workers if w.worker_id in self.tokens]
        return sum(known) if known else None


def rates(before: Look | None, now: Look) -> Rates:
    """What happened between two looks."""
    if before is None or now.at_s <= before.at_s:
        return Rates(tokens={}, link_bytes={})
    elapsed_s = now.at_s - before.at_s
    tokens: dict[str, float] = {}
    link_bytes: dict[tuple[str, str], float] = {}
    for old, new in _same_workers(before.status, now.status):
        tokens[new.worker_id] = (new.num_tokens - old.num_tokens) / elapsed_s
        old_bytes = {(link.peer_worker_id, link.peer_epoch): link.num_bytes for link in old.links}
        for link in new.links:
            sent = link.num_bytes - old_bytes.get((link.peer_worker_id, link.peer_epoch), 0)
            link_bytes[new.worker_id, link.peer_worker_id] = max(0, sent) / elapsed_s
    return Rates(tokens=tokens, link_bytes=link_bytes)


def _same_workers(before: ClusterStatus, now: ClusterStatus) -> Iterator[tuple[WorkerStatus, WorkerStatus]]:
    """Pairs of one incarnation that answered both times."""
    old = {(w.worker_id, w.epoch): w for w in before.workers if _has_counters(w)}
    for worker in now.workers:
        if _has_counters(worker) and (worker.worker_id, worker.epoch) in old:
            yield old[worker.worker_id, worker.epoch], worker


def _has_counters(worker: WorkerStatus) -> bool:
    return worker.epoch > 0 and worker.state != "unreachable" and not worker.is_late


def render(before: Look | None, now: Look, *, note: str = "") -> Group:
    """The whole screen. `note` says why this is not what is now, when it is not."""
    status, measured = now.status, rates(before, now)
    head = headline(status)
    if note:
        head.append(f"\n{note}", style="bold yellow")
    parts: list[RenderableType] = [head, *unplaced(status), "", _pools(status, measured), ""]
    parts.append(_workers(status, measured))
    if any(worker.links for worker in status.workers):
        parts += ["", _links(status, measured)]
    return Group(*parts)


def _open_requests(status: ClusterStatus) -> str:
    return f"{status.num_running_requests} open request{'' if status.num_running_requests == 1 else 's'}"


def headline(status: ClusterStatus) -> Text:
    """The model, how many requests are open, and what is not as usual."""
    head = Text(f"{status.model or 'no model yet'} · {_open_requests(status)}")
    if status.is_draining:
        head.append(f" · shutting down: new requests are refused{_left(status)}", style="yellow")
    elif not status.has_controller and status.pools:
        head.append(" · no controller: sizes do not change, lost workers are not replaced", style="yellow")
    missing = [pool.role for pool in status.pools if pool.desired and not pool.num_ready]
    if missing and not status.is_draining:
        head.append(f" · no {' and no '.join(missing)} worker is ready", style="yellow")
    return head


def unplaced(status: ClusterStatus) -> list[Text]:
    """A line for each pool and reason: workers that no node has room for."""
    waiting = Counter((w.role, w.waits_for) for w in status.workers if w.waits_for)
    return [
        Text(f"{role}: {plural(count, 'worker')} {'waits' if count == 1 else 'wait'} for a node with room: {why}")
        for (role, why), count in waiting.items()
    ]


def _left(status: ClusterStatus) -> str:
    """What a cluster that shuts down still does."""
    if status.num_running_requests:
        return ", running ones may finish"
    left = [worker.worker_id for worker in status.workers]
    return f", none is left; {', '.join(left)} still to end" if left else ", none is left"


def state_of(worker: WorkerStatus) -> str:
    """Its state; "?" says that it did not answer in time, and that its numbers are those of its last heartbeat."""
    return worker.state + ("?" if worker.is_late else "")


def short_transport(link: LinkStatus, max_chars: int) -> str:
    """The transport and the first of what it negotiated, cut to `max_chars`."""
    text = f"{link.transport}: {link.detail.partition(';')[0]}"
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"


def _pools(status: ClusterStatus, measured: Rates) -> Table:
    table = Table("pool", "desired", "ready", "draining", "running", "waiting", "tokens/s", box=None, pad_edge=False)
    for role in ROLES:
        workers = [w for w in status.workers if w.role == role]
        pool = pool_of(status, role)
        counts = (pool.num_ready, pool.num_draining, sum(w.num_running for w in workers))
        desired = str(pool.desired) if any(p.role == role for p in status.pools) else "-"
        waiting = sum(w.num_waiting for w in workers)
        table.add_row(role, desired, *map(str, counts), str(waiting), _rate(measured.of_pool(workers)))
    return table


def pool_of(status: ClusterStatus, role: str) -> PoolStatus:
    """What the controller says of a pool; counted from the workers where it says nothing."""
    for pool in status.pools:
        if pool.role == role:
            return pool
    states = [w.state for w in status.workers if w.role == role]
    return PoolStatus(role=role, num_ready=states.count("ready"), num_draining=states.count("draining"))


def _workers(status: ClusterStatus, measured: Rates) -> Table:
    table = Table("worker", "state", "node", "blocks", "", "running", "waiting", "tokens/s", box=None, pad_edge=False)
    for w in status.workers:
        used = w.num_blocks - w.num_free_blocks
        state = Text(state_of(w), style="" if w.state == "ready" else "yellow")
        shown = f"{used}/{w.num_blocks}"
        rate = _rate(measured.tokens.get(w.worker_id))
        counts = (str(w.num_running), str(w.num_waiting))
        table.add_row(w.worker_id, state, w.node or "-", bar(used, w.num_blocks), shown, *counts, rate)
    return table


def bar(used: int, total: int) -> Text:
    """A bar of fixed width."""
    share = used / total if total else 0.0
    filled = min(_BAR_CHARS, round(share * _BAR_CHARS) or (1 if used else 0))
    style = "red" if share >= _FULL else "green"
    return Text.assemble(("█" * filled, style), ("░" * (_BAR_CHARS - filled), "dim"))


def _links(status: ClusterStatus, measured: Rates) -> Table:
    table = Table("link", "transport", "sent", "moved now", "moved while busy", box=None, pad_edge=False)
    for worker in status.workers:
        for link in worker.links:
            now = measured.link_bytes.get((worker.worker_id, link.peer_worker_id))
            moved = f"{data_size(int(now))}/s" if now is not None else "-"
            name = f"{worker.worker_id} → {link.peer_worker_id}"
            table.add_row(name, short_transport(link, _TRANSPORT_CHARS), data_size(link.num_bytes), moved, _speed(link))
    return table


def _speed(link: LinkStatus) -> str:
    return f"{link.bytes_per_s / 1e9:.3g} GB/s" if link.bytes_per_s else "-"


def _rate(per_s: float | None) -> str:
    return "-" if per_s is None else f"{per_s:.1f}"


def line(before: Look | None, now: Look) -> str:
    """The same, for logs: one line."""
    status, measured = now.status, rates(before, now)
    parts = [_open_requests(status), *(["shutting down"] if status.is_draining else [])]
    for role in ROLES:
        workers = [w for w in status.workers if w.role == role]
        pool = pool_of(status, role)
        blocks = sum(w.num_blocks for w in workers)
        used = blocks - sum(w.num_free_blocks for w in workers)
        wanted = f"/{pool.desired}" if any(p.role == role for p in status.pools) else ""
        draining = f", {pool.num_draining} draining" if pool.num_draining else ""
        draining += f", {pool.num_unplaced} without room" if pool.num_unplaced else ""
        tokens = _rate(measured.of_pool(workers))
        parts.append(f"{role} {pool.num_ready}{wanted} ready{draining}, {used}/{blocks} blocks, {tokens} tokens/s")
    if measured.link_bytes:
        parts.append(f"KV {data_size(int(sum(measured.link_bytes.values())))}/s")
    return " · ".join(parts)
