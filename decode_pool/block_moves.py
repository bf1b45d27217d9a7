"""Carries out what a plan says about blocks, before its steps: from host memory, to it, and within the cache."""

from __future__ import annotations

import time

from decode_pool.plan import DecodePlan
from tandem.model.executor import Executor
from tandem.observability.worker_metrics import DecodeMetrics


def move_blocks(executor: Executor, plan: DecodePlan, metrics: DecodeMetrics) -> None:
    """On the engine's thread."""
    if plan.ins:
        started_s = time.monotonic()
        executor.swap_in([swap.slot for swap in plan.ins], [swap.block for swap in plan.ins])
        metrics.swapped("in", len(plan.ins), seconds=time.monotonic() - started_s)
    if plan.outs:
        started_s = time.monotonic()
        executor.swap_out([swap.block for swap in plan.outs], [swap.slot for swap in plan.outs])
        metrics.swapped("out", len(plan.outs), seconds=time.monotonic() - started_s)
    metrics.preemptions.inc(len(plan.preempted))
    if plan.copies:
        executor.copy_blocks([copy.source for copy in plan.copies], [copy.destination for copy in plan.copies])
