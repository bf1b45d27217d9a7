"""A prefill worker as whoever starts processes sees it (a Ray actor in `cluster/pools.py`; nothing here needs Ray)."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from kv_transfer.source_ranks import SourceRanks
from kv_transfer.transport import Transport
from kv_transfer.transports import make_transport
from prefill_pool.job import PrefillLimits
from prefill_pool.service import PrefillService
from prefill_pool.worker import PrefillWorker
from tandem.model.devices import choose_device
from tandem.model.executor import Executor
from tandem.ranks.executor import ParallelExecutor
from tandem.types import Epoch, Role
from tandem.worker.build import build_executor, exit_on_crash, worker_facts
from tandem.worker.host import HostedWorker, Mark, WorkerFacts, WorkerHost, WorkerSettings
from tandem.worker.prefix_tiers import open_tiers


async def build(settings: WorkerSettings, epoch: Epoch, mark: Mark) -> HostedWorker:
    """Transport, model, worker, in this order."""
    config = settings.config
    device = choose_device(config.model.device)
    transport = make_transport(
        config.transfer.transport, worker_id=settings.worker_id, host=settings.host, device=device
    )
    mark("transport")
    executor = await asyncio.to_thread(
        build_executor,
        settings,
        config.prefill,
        rank_class="prefill_pool.rank:PrefillRank",
        device=device,
        allocate=transport.allocate,
        mark=mark,
    )
    facts = worker_facts(
        Role.PREFILL, config.model, executor, transport=transport.name, compute=executor.compute
    )
    return await assemble(settings, epoch, mark, executor=executor, transport=transport, facts=facts)


async def assemble(
    settings: WorkerSettings,
    epoch: Epoch,
    mark: Mark,
    *,
    executor: Executor,
    transport: Transport,
    facts: WorkerFacts,
) -> PrefillService:
    """The worker around an executor whose KV lies in the transport's memory."""
    config = settings.config
    tiers = await open_tiers(
        settings, epoch, executor.cache.layout, fingerprint=facts.fingerprint, num_ranks=config.prefill.num_ranks
    )
    mark("prefix store")
    worker = PrefillWorker(
        executor,
        worker_id=settings.worker_id,
        epoch=epoch,
        fingerprint=facts.fingerprint,
        key=settings.key,
        transport=transport,
        limits=PrefillLimits(
            max_batch_tokens=config.prefill.max_batch_tokens,
            max_batch_sequences=config.prefill.max_batch_sequences,
            ticket_lookahead_tokens=config.prefill.ticket_lookahead_tokens,
            ageing_tokens_per_s=config.prefill.ageing_tokens_per_s,
            max_iteration_s=config.prefill.max_iteration_ms / 1000,
            lease_s=config.transfer.lease_s,
            max_resends=config.transfer.max_resends,
            layers_per_message=config.transfer.layers_per_message,
            digest_every=config.transfer.digest_every,
            min_gbps=config.transfer.min_gbps,
            strict=config.transfer.strict,
        ),
        on_crash=settings.on_crash or exit_on_crash,
        ranks=SourceRanks(executor.hub) if isinstance(executor, ParallelExecutor) else None,
        tiers=tiers,
    )
    return PrefillService(worker, facts)


class PrefillActor:
    """`settings`: config (mapping), worker_id, redis_url, host, cores. The constructor only starts threads."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._host = WorkerHost(WorkerSettings.from_mapping(settings), Role.PREFILL, build)

    def ready(self) -> dict[str, Any]:
        """Blocks until registered: worker_id, role, address, pid, startup seconds by phase."""
        return self._host.ready()

    def drain(self, timeout_s: float) -> bool:
        """Stops admission; whether nothing runs any more within timeout_s."""
        return self._host.drain(timeout_s)

    def stop(self) -> None:
        """Ends everything."""
        self._host.stop()

    def ping(self) -> int:
        """The process id."""
        return os.getpid()
