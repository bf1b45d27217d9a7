"""A decode worker as whoever starts processes sees it (a Ray actor in `cluster/pools.py`; nothing here needs Ray)."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from decode_pool.service import DecodeService
from decode_pool.worker import DecodeWorker
from kv_transfer.destination_ranks import DestinationRanks
from kv_transfer.transport import Transport
from kv_transfer.transports import make_transport
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
        config.decode,
        rank_class="decode_pool.rank:DecodeRank",
        device=device,
        allocate=transport.allocate,
        mark=mark,
    )
    facts = worker_facts(
        Role.DECODE, config.model, executor, transport=transport.name, compute=executor.compute
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
) -> DecodeService:
    """The worker around an executor whose KV lies in the transport's memory."""
    config = settings.config
    tiers = await open_tiers(
        settings, epoch, executor.cache.layout, fingerprint=facts.fingerprint, num_ranks=config.decode.num_ranks
    )
    mark("prefix store")
    worker = DecodeWorker(
        executor,
        worker_id=settings.worker_id,
        epoch=epoch,
        fingerprint=facts.fingerprint,
        key=settings.key,
        transport=transport,
        max_batch_sequences=config.decode.max_batch_sequences,
        growth_tokens=config.decode.growth_tokens,
        swap_blocks=config.decode.swap_blocks,
        lease_s=config.transfer.lease_s,
        on_crash=settings.on_crash or exit_on_crash,
        ranks=DestinationRanks(executor.hub) if isinstance(executor, ParallelExecutor) else None,
        tiers=tiers,
    )
    return DecodeService(worker, facts)


class DecodeActor:
    """`settings`: config (mapping), worker_id, redis_url, host, cores. The constructor only starts threads."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._host = WorkerHost(WorkerSettings.from_mapping(settings), Role.DECODE, build)

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
