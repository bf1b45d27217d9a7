"""Keeps the router's view of the workers: the registry's records, what was given to whom, and who did not answer.

When Redis is away the last view stays. A worker whose call failed is left out until it answers again, or has
registered as a later incarnation. Which worker to take is `policy.py`'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import grpc
from redis.exceptions import RedisError

from router.charges import Charge
from router.view import ClusterView, Incarnation, WorkerView
from tandem.observability.metrics import RouterMetrics
from tandem.pool_state import PoolState, SeenState, SeenWorker
from tandem.registry import Registry, WorkerRecord
from tandem.rpc.channels import Channels
from tandem.rpc.tandem.v1 import inference_pb2, worker_pb2, worker_pb2_grpc
from tandem.secret import ClusterKey
from tandem.tasks import cancel_all
from tandem.types import Epoch, Role, WorkerId

logger = logging.getLogger(__name__)

POLL_S = 0.5
"""How often the registry is read when it announces nothing; `charges.NUM_WINDOWS` of these outlast a heartbeat."""
PROBE_TIMEOUT_S = 1.0
_WILL_SERVE: tuple[SeenState, ...] = ("starting", "ready", "lost")


class WorkerTracker:
    """Event loop only. `on_change` is called after each change of who may be given requests."""

    def __init__(
        self,
        registry: Registry,
        *,
        key: ClusterKey,
        on_change: Callable[[], None],
        metrics: RouterMetrics | None = None,
        state: PoolState | None = None,
    ) -> None:
        """Without `state` nobody knows of workers that are not registered: none is coming."""
        self.channels = Channels(key)
        self.metrics = metrics or RouterMetrics()
        self._registry = registry
        self._state = state
        self._seen: tuple[SeenWorker, ...] = ()
        self._news = asyncio.Event()
        self._on_change = on_change
        self._records: dict[WorkerId, WorkerRecord] = {}
        self._suspects: dict[WorkerId, Epoch] = {}
        self._charges: dict[WorkerId, Charge] = {}
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Starts to follow the registry."""
        self._tasks = [asyncio.create_task(self._poll()), asyncio.create_task(self._watch())]

    async def close(self) -> None:
        """Stops following and closes all channels."""
        await cancel_all(self._tasks)
        await self.channels.close()

    def view(self) -> ClusterView:
        """All workers that may be given requests now."""
        workers = tuple(self._view_of(r) for r in self._records.values() if self._is_usable(r))
        return ClusterView(workers=workers, coming=self._coming())

    def _coming(self) -> frozenset[Role]:
        """A worker that the controller takes for ready, and that is not, was just lost, or will be seen at once."""
        usable = {worker_id for worker_id, _ in self._usable()}
        return frozenset(w.role for w in self._seen if w.state in _WILL_SERVE and w.worker_id not in usable)

    async def news(self) -> None:
        """Returns when something about the workers has changed."""
        await self._news.wait()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def absent(self) -> list[SeenWorker]:
        """Workers that start or are lost, and so are not registered."""
        return [w for w in self._seen if w.worker_id not in self._records and w.state in _WILL_SERVE]

    def records(self) -> list[WorkerRecord]:
        """All registered workers, by id."""
        return list(self._records.values())

    def charge(
        self,
        worker_id: WorkerId,
        *,
        num_tokens: int = 0,
        num_blocks: int = 0,
        num_cached_tokens: int = 0,
        num_held_blocks: int = 0,
    ) -> Callable[[], None]:
        """Counts a request against a worker until the returned function is called; more calls do nothing.

        Cached tokens and held blocks are what it needs besides and is expected to find there.
        """
        if (record := self._records.get(worker_id)) is not None:
            self.metrics.routed(record.role, worker_id)
        charge = self._charges.setdefault(worker_id, Charge())
        found = {"num_cached_tokens": num_cached_tokens, "num_held_blocks": num_held_blocks}
        charge.add(num_tokens=num_tokens, num_blocks=num_blocks, num_requests=1, **found)
        left = [True]

        def discharge() -> None:
            if left:
                left.clear()
                back = {name: -count for name, count in found.items()}
                charge.add(num_tokens=-num_tokens, num_blocks=-num_blocks, num_requests=-1, **back)

        return discharge

    def suspect(self, worker_id: WorkerId, epoch: Epoch) -> None:
        """A call to this incarnation failed: give it nothing until it answers a probe or registers anew."""
        record = self._records.get(worker_id)
        if record is not None and record.epoch == epoch and worker_id not in self._suspects:
            logger.warning("worker %s does not answer, it gets no requests until it does", worker_id)
            self._suspects[worker_id] = epoch
            self._changed.set()
            self._on_change()
            self._tell()

    async def check(self, incarnation: Incarnation) -> None:
        """Gives it nothing any more if it cannot be reached."""
        worker_id, epoch = incarnation
        record = self._records.get(worker_id)
        if record is not None and record.epoch == epoch and (await self._status_of(record)).state == "unreachable":
            self.suspect(worker_id, epoch)

    async def statuses(self) -> list[inference_pb2.WorkerStatus]:
        """Each registered worker's own word, or its last report where it takes long to answer, or "unreachable"."""
        return list(await asyncio.gather(*(self._status_of(record) for record in self._records.values())))

    # --- following

    async def _poll(self) -> None:
        while True:
            try:
                records = await self._registry.workers()
                seen = self._seen if self._state is None else await self._state.seen()
                self._update(records, seen)
            except RedisError as exc:
                logger.warning("Redis is away, keeping the last view of %d workers: %s", len(self._records), exc)
            await self._probe_suspects()
            try:
                async with asyncio.timeout(POLL_S):
                    await self._changed.wait()
            except TimeoutError:
                continue
            self._changed.clear()

    async def _watch(self) -> None:
        while True:
            try:
                async for _ in self._registry.changes():
                    self._changed.set()
            except RedisError:
                await asyncio.sleep(POLL_S)  # the poll reports it; this is only the pace of reconnecting

    def _update(self, records: list[WorkerRecord], seen: tuple[SeenWorker, ...]) -> None:
        before = self._usable()
        was_coming = self._coming()
        self._seen = seen
        self._records = {record.worker_id: record for record in records}
        for charge in self._charges.values():
            charge.roll()
        for worker_id, epoch in list(self._suspects.items()):
            record = self._records.get(worker_id)
            if record is None or record.epoch != epoch:
                del self._suspects[worker_id]
        self._note_changes(before)
        if self._coming() != was_coming:
            self._tell()

    async def _probe_suspects(self) -> None:
        before = self._usable()
        for worker_id in list(self._suspects):
            status = await self._status_of(self._records[worker_id])
            if not (status.state == "unreachable" or status.is_late):
                self._suspects.pop(worker_id, None)
        self._note_changes(before)

    def _note_changes(self, before: set[tuple[WorkerId, Epoch]]) -> None:
        after = self._usable()
        for worker_id, epoch in sorted(after - before):
            logger.info("worker %s (epoch %d) takes requests", worker_id, epoch)
        for worker_id, epoch in sorted(before - after):
            logger.info("worker %s (epoch %d) takes no more requests", worker_id, epoch)
        if before != after:
            self._on_change()
            self._tell()

    def _usable(self) -> set[tuple[WorkerId, Epoch]]:
        return {(r.worker_id, r.epoch) for r in self._records.values() if self._is_usable(r)}

    def _is_usable(self, record: WorkerRecord) -> bool:
        return record.state == "ready" and record.worker_id not in self._suspects

    def _view_of(self, record: WorkerRecord) -> WorkerView:
        charge = self._charges.get(record.worker_id, Charge())
        return WorkerView(
            worker_id=record.worker_id,
            role=Role(record.role),
            address=record.address,
            epoch=record.epoch,
            fingerprint=record.fingerprint,
            transport=record.transport,
            node=record.node,
            store_node=record.store_node,
            model=record.model,
            max_context_tokens=record.max_context_tokens,
            model_context_tokens=record.model_context_tokens,
            num_blocks=record.num_blocks,
            block_size=record.block_size,
            num_waiting_tokens=charge.total_tokens(record.load.num_waiting_tokens),
            num_used_blocks=charge.total_blocks(record.num_blocks - record.load.num_free_blocks),
            num_requests=charge.num_requests,
        )

    def _is_current(self, link: inference_pb2.LinkStatus) -> bool:
        """Whether its peer is there, and not only a successor of the one that was measured."""
        peer = self._records.get(WorkerId(link.peer_worker_id))
        return peer is not None and peer.epoch == link.peer_epoch

    async def _status_of(self, record: WorkerRecord) -> inference_pb2.WorkerStatus:
        stub = worker_pb2_grpc.WorkerStub(self.channels.get(record.address))
        try:
            status = await stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=PROBE_TIMEOUT_S)
        except grpc.aio.AioRpcError as exc:
            is_late = exc.code() is grpc.StatusCode.DEADLINE_EXCEEDED and record.worker_id not in self._suspects
            status = _last_report(record) if is_late else _unreachable(record)
        links = [link for link in status.links if self._is_current(link)]
        del status.links[:]
        status.links.extend(links)
        status.address = record.address
        status.generation = record.generation
        status.node = record.node
        status.transport = record.transport
        return status


def _last_report(record: WorkerRecord) -> inference_pb2.WorkerStatus:
    """A worker that renews its registration serves, however long it takes to answer."""
    return inference_pb2.WorkerStatus(
        worker_id=record.worker_id,
        role=record.role,
        state=record.state,
        epoch=record.epoch,
        pid=record.pid,
        num_blocks=record.num_blocks,
        num_free_blocks=record.load.num_free_blocks,
        num_running=record.load.num_running,
        num_waiting=record.load.num_waiting,
        num_waiting_tokens=record.load.num_waiting_tokens,
        metrics_url=record.metrics_url,
        is_late=True,
    )


def _unreachable(record: WorkerRecord) -> inference_pb2.WorkerStatus:
    return inference_pb2.WorkerStatus(
        worker_id=record.worker_id, role=record.role, state="unreachable", epoch=record.epoch
    )
