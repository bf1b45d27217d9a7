"""What building a worker has in common in both pools: the executor in the transport's memory, and its facts."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch

from tandem.config import DecodeConfig, ModelConfig, PrefillConfig, to_mapping
from tandem.errors import ClusterError
from tandem.model.cuda_graphs import CudaCapturer
from tandem.model.executor import Executor
from tandem.model.outputs import warm_up
from tandem.model.spec import fingerprint
from tandem.model.torch_executor import TorchExecutor, load_executor
from tandem.ranks.executor import ParallelExecutor
from tandem.ranks.hub import RankHub
from tandem.ranks.loading import RankShape, load_rank
from tandem.types import Role
from tandem.worker.host import Mark, WorkerFacts, WorkerSettings

logger = logging.getLogger(__name__)

CRASHED = 70
"""Exit status of a worker whose engine failed; whoever supervises it starts it again."""


def build_executor(
    settings: WorkerSettings,
    pool: PrefillConfig | DecodeConfig,
    *,
    rank_class: str,
    device: torch.device,
    allocate: Callable[[int], torch.Tensor],
    mark: Mark,
) -> TorchExecutor | ParallelExecutor:
    """Loads and warms up the model, on all ranks. Takes seconds: call it on a thread.

    `device` is rank 0's, and that of what `allocate` gives; `rank_class` ("module:Class") is what the other ranks run.
    Raises ModelLoadError; ConfigError when the model cannot be cut as the pool is configured.
    """
    executor: TorchExecutor | ParallelExecutor
    if pool.num_ranks > 1:
        executor = _build_ranks(
            settings, pool, rank_class=rank_class, device=device, allocate=allocate, mark=mark
        )
    else:
        executor = _build_one(settings, pool, device=device, allocate=allocate, mark=mark)
    logger.info("%s computes on %s", settings.worker_id, executor.compute)
    return executor


def _build_one(
    settings: WorkerSettings,
    pool: PrefillConfig | DecodeConfig,
    *,
    device: torch.device,
    allocate: Callable[[int], torch.Tensor],
    mark: Mark,
) -> TorchExecutor:
    model = settings.config.model
    executor = load_executor(
        model.source,
        dtype=model.kv_dtype(on_gpu=device.type != "cpu"),
        block_size=model.block_size,
        num_blocks=pool.num_blocks,
        allocate=allocate,
        num_threads=pool.num_threads or len(os.sched_getaffinity(0)),
    )
    mark("load model")
    if device.type != "cpu" and isinstance(pool, DecodeConfig):
        executor.stage.use_graphs(pool.max_batch_sequences, CudaCapturer())
    warm_up(executor)
    mark("warm up")
    return executor


def _build_ranks(
    settings: WorkerSettings,
    pool: PrefillConfig | DecodeConfig,
    *,
    rank_class: str,
    device: torch.device,
    allocate: Callable[[int], torch.Tensor],
    mark: Mark,
) -> ParallelExecutor:
    """All ranks load side by side, each its own part. A rank that is lost later ends the worker."""
    if settings.start_rank is None:
        raise ClusterError(f"worker {settings.worker_id} has {pool.num_ranks} ranks, and nothing here starts them")
    hub = RankHub(settings.key, num_ranks=pool.num_ranks, on_lost=settings.on_crash or exit_on_crash)
    try:
        for rank in range(1, pool.num_ranks):
            settings.start_rank(rank_class, rank_values(settings, hub, rank))
        own = load_rank(
            settings.config.model,
            RankShape(tp=pool.tensor_parallel, pp=pool.pipeline_parallel, rank=0, device=device),
            num_blocks=pool.num_blocks,
            num_threads=pool.num_threads or len(os.sched_getaffinity(0)),
            allocate=allocate,
            meet=lambda: hub.store,
        )
        mark(f"load rank 0 ({own.weights_bytes / 1e6:.1f} MB of weights)")
        for report in hub.wait_ready():
            mark(f"load rank {report.rank} ({report.weights_bytes / 1e6:.1f} MB of weights)", report.load_s)
        mark("wait for ranks")
        executor = ParallelExecutor(own, hub)
        warm_up(executor)
        mark("warm up")
    except BaseException:
        hub.close()
        raise
    return executor


def rank_values(settings: WorkerSettings, hub: RankHub, rank: int) -> dict[str, Any]:
    """What a rank is told, as plain data: see `kv_transfer.rank_process.RankSettings`."""
    return {
        "config": to_mapping(settings.config),
        "worker_id": str(settings.worker_id),
        "rank": rank,
        "port": hub.port,
        "store_port": hub.store_port,
        "host": settings.host,
        "cores": list(settings.cores),
    }


def worker_facts(
    role: Role, model: ModelConfig, executor: Executor, *, transport: str, compute: str = ""
) -> WorkerFacts:
    """What the worker publishes of itself; `compute` is the executor's, for people."""
    spec, cache = executor.spec, executor.cache
    limit = min(spec.max_context_tokens, model.max_context_tokens or spec.max_context_tokens)
    return WorkerFacts(
        role=role,
        fingerprint=fingerprint(spec, spec.kv_layout(block_size=cache.layout.block_size, dtype=cache.layout.dtype)),
        model=model.served_name or spec.name,
        max_context_tokens=min(limit, cache.num_blocks * cache.layout.block_size),
        model_context_tokens=limit,
        num_blocks=cache.num_blocks,
        block_size=cache.layout.block_size,
        transport=transport,
        compute=compute,
    )


def exit_on_crash(error: BaseException) -> None:
    """For `Engine`: state after a failed iteration cannot be trusted, so the process ends and is started again."""
    logger.critical("worker process ends, its engine failed: %s", error)
    logging.shutdown()
    os._exit(CRASHED)
