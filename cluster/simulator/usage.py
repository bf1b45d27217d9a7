"""What simulated workers did, added up, and whom a simulated cluster tells of its outputs. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from cluster.simulator.life import Life
from decode_pool.scheduler import DecodeScheduler
from prefill_pool.scheduler import PrefillScheduler


@dataclass(frozen=True, kw_only=True, slots=True)
class Listener:
    """Told at the moment at which it happens on the worker."""

    token: Callable[[Life], None]
    ended: Callable[[Life], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolUsage:
    """All workers of a pool together."""

    num_workers: int
    busy_s: float
    """Seconds in iterations, summed over the workers."""
    num_iterations: int
    num_tokens: int
    """Computed: prompt tokens in prefill, output tokens in decode."""

    def share(self, duration_s: float) -> float:
        """Of the workers' time, how much they were busy."""
        return self.busy_s / (self.num_workers * duration_s) if duration_s else 0.0

    @property
    def tokens_per_iteration(self) -> float:
        """Mean."""
        return self.num_tokens / self.num_iterations if self.num_iterations else 0.0


class Node(Protocol):
    """What a simulated worker counts."""

    busy_s: float
    num_iterations: int
    num_tokens: int


def usage_of(nodes: Iterable[Node]) -> PoolUsage:
    """Their sum."""
    nodes = tuple(nodes)
    return PoolUsage(
        num_workers=len(nodes),
        busy_s=sum(node.busy_s for node in nodes),
        num_iterations=sum(node.num_iterations for node in nodes),
        num_tokens=sum(node.num_tokens for node in nodes),
    )


def check_is_idle(scheduler: PrefillScheduler | DecodeScheduler, name: str) -> None:
    """Asserts that no request and no block is left on a worker."""
    scheduler.check_invariants()
    assert not len(scheduler), name
    assert scheduler.pool.num_free == scheduler.pool.num_blocks, name
