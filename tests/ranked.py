"""Workers of several ranks in this process: real gRPC, real transports, each other rank a thread with its own slices.

What is different from production is who starts a rank, and that one that fails is noted and ends no process.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import decode_pool.actor
import decode_pool.rank
import prefill_pool.actor
import prefill_pool.rank
from decode_pool.service import DecodeService
from kv_transfer.rank_process import RankProcess, RankSettings
from prefill_pool.service import PrefillService
from router.dispatcher import LegDispatch
from router.policy import Route
from router.tracker import WorkerTracker
from router.view import WorkerView
from tandem.config import from_mapping
from tandem.registry import Registry
from tandem.rpc.authentication import CallGuard
from tandem.rpc.server import start_server
from tandem.types import Epoch, Role, TokenStep, WorkerId
from tandem.worker.host import WorkerSettings
from tests.factories import CLUSTER_KEY
from tests.pair import BLOCK_SIZE, CHUNK_TOKENS, make_live_request, until

Service = PrefillService | DecodeService


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How a worker is cut."""

    tp: int = 1
    pp: int = 1

    def __str__(self) -> str:
        return f"tp{self.tp}pp{self.pp}"


@dataclass(kw_only=True)
class RankedWorker:
    """A running worker; `failures` is what its ranks and its engine came to grief with."""

    role: Role
    shape: Shape
    service: Service
    view: WorkerView
    failures: list[BaseException]
    ranks: list[RankProcess] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether all blocks are free or kept for reuse, and nothing runs or moves."""
        worker = self.service.worker
        status = self.service.status()
        return not (len(worker.scheduler) or status.num_handoffs)


@asynccontextmanager
async def ranked_worker(
    model: Path, role: Role, shape: Shape, *, num_blocks: int = 64, **changes: Any
) -> AsyncIterator[RankedWorker]:
    """Everything that belongs to one worker, gone when the block is left. `changes` are of the section `transfer`."""
    section = {
        "num_blocks": num_blocks,
        "num_threads": 1,
        "tensor_parallel": shape.tp,
        "pipeline_parallel": shape.pp,
    }
    if role is Role.PREFILL:
        section |= {"max_batch_tokens": changes.pop("chunk_tokens", CHUNK_TOKENS)}
    config = from_mapping(
        {
            "model": {"source": str(model), "block_size": BLOCK_SIZE},
            role.value: section,
            "transfer": {"transport": "shm", "layers_per_message": 1, **changes},
            "prefix_store": {"enabled": False},
        }
    )
    failures: list[BaseException] = []
    ranks: list[RankProcess] = []
    parts = prefill_pool.rank.make_part if role is Role.PREFILL else decode_pool.rank.make_part

    def start_rank(_: str, values: dict[str, Any]) -> None:
        settings = RankSettings(
            config=config,
            worker_id=WorkerId(values["worker_id"]),
            rank=values["rank"],
            port=values["port"],
            store_port=values["store_port"],
            host=values["host"],
            cores=(),
            key=CLUSTER_KEY,
        )
        ranks.append(
            RankProcess(settings, role, parts, on_end=lambda error: error is None or failures.append(error))
        )

    settings = WorkerSettings(
        config=config,
        worker_id=WorkerId(f"{role}-{shape}"),
        redis_url="",
        host="127.0.0.1",
        cores=(),
        key=CLUSTER_KEY,
        start_rank=start_rank,
        on_crash=failures.append,
    )
    build: Any = prefill_pool.actor.build if role is Role.PREFILL else decode_pool.actor.build
    service: Service = await build(settings, Epoch(3), lambda phase, took_s=None: None)
    server = await start_server(
        "127.0.0.1", 0, service.register, service.service_names(), guard=CallGuard(CLUSTER_KEY)
    )
    facts = service.facts
    view = WorkerView(
        worker_id=settings.worker_id,
        role=role,
        address=server.address,
        epoch=Epoch(3),
        fingerprint=facts.fingerprint,
        node="here",
        transport=facts.transport,
        model=facts.model,
        max_context_tokens=facts.max_context_tokens,
        num_blocks=facts.num_blocks,
        block_size=facts.block_size,
        num_waiting_tokens=0,
        num_used_blocks=0,
        num_requests=0,
    )
    worker = RankedWorker(role=role, shape=shape, service=service, view=view, failures=failures, ranks=ranks)
    try:
        yield worker
        await until(lambda: worker.is_empty, what=lambda: str(service.status()))
        service.worker.scheduler.check_invariants()
        assert not failures
    finally:
        await server.stop(0.0)
        await service.close()
        await asyncio.to_thread(lambda: [rank.join(10.0) for rank in ranks])


@asynccontextmanager
async def a_tracker() -> AsyncIterator[WorkerTracker]:
    """Channels to workers, as a router has them."""
    registry = Registry("redis://127.0.0.1:1/0", cluster="nobody", ttl_s=1.0)
    tracker = WorkerTracker(registry, key=CLUSTER_KEY, on_change=lambda: None)
    try:
        yield tracker
    finally:
        await tracker.close()
        await registry.close()


async def run_on(
    prefill: RankedWorker, decode: RankedWorker, tracker: WorkerTracker, prompt: Sequence[int], **sampling: Any
) -> list[int]:
    """A request from its start to its last token; nothing of it is found or kept. Raises TandemError."""
    async with dispatched(prefill, decode, tracker, prompt, **sampling) as dispatch:
        return [step.token_id async for step in dispatch if isinstance(step, TokenStep)]


@asynccontextmanager
async def dispatched(
    prefill: RankedWorker, decode: RankedWorker, tracker: WorkerTracker, prompt: Sequence[int], **sampling: Any
) -> AsyncIterator[LegDispatch]:
    """A request as the router starts it, and ends it."""
    request = make_live_request(prompt, **{"timeout_s": 60.0, "salt": None, **sampling})
    dispatch = LegDispatch(request, Route(prefill=prefill.view, decode=decode.view), tracker)
    dispatch.start()
    try:
        yield dispatch
    finally:
        await dispatch.finish()
