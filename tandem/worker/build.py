"""What building a worker has in common in both pools: the executor in the transport's memory, and its facts."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import torch

from tandem.config import ModelConfig
from tandem.model.executor import Executor
from tandem.model.spec import fingerprint
from tandem.model.torch_executor import TorchExecutor, load_executor
from tandem.types import Role
from tandem.worker.host import WorkerFacts

logger = logging.getLogger(__name__)

CRASHED = 70
"""Exit status of a worker whose engine failed; whoever supervises it starts it again."""


def build_executor(
    model: ModelConfig,
    *,
    num_blocks: int,
    num_threads: int,
    allocate: Callable[[int], torch.Tensor],
    mark: Callable[[str], None],
) -> TorchExecutor:
    """Loads and warms up the model. Takes seconds: call it on a thread. Raises ModelLoadError."""
    executor = load_executor(
        model.source,
        dtype=model.dtype,
        block_size=model.block_size,
        num_blocks=num_blocks,
        allocate=allocate,
        num_threads=num_threads or len(os.sched_getaffinity(0)),
    )
    mark("load model")
    executor.warm_up()
    mark("warm up")
    return executor


def worker_facts(role: Role, model: ModelConfig, executor: Executor, *, transport: str) -> WorkerFacts:
    """What the worker publishes of itself."""
    spec, cache = executor.spec, executor.cache
    limit = min(spec.max_context_tokens, model.max_context_tokens or spec.max_context_tokens)
    return WorkerFacts(
        role=role,
        fingerprint=fingerprint(spec, cache.layout),
        model=model.served_name or spec.name,
        max_context_tokens=min(limit, cache.num_blocks * cache.layout.block_size),
        model_context_tokens=limit,
        num_blocks=cache.num_blocks,
        block_size=cache.layout.block_size,
        transport=transport,
    )


def exit_on_crash(error: BaseException) -> None:
    """For `Engine`: state after a failed iteration cannot be trusted, so the process ends and is started again."""
    logger.critical("worker process ends, its engine failed: %s", error)
    logging.shutdown()
    os._exit(CRASHED)
