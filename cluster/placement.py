"""Which cores each worker gets, and what it asks of the scheduler. Pure.

Workers get disjoint core sets where there are enough cores; with fewer, the two pools at least do not disturb each
other; on a single core nobody is pinned. Spare cores go to prefill first, because prefill is bound by compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.types import Role, WorkerId

RESOURCE = {Role.PREFILL: "tandem_prefill", Role.DECODE: "tandem_decode"}
"""Name of each pool's custom resource: one unit per worker."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerPlacement:
    """One worker's place. `cores` is empty when the worker is not pinned."""

    worker_id: WorkerId
    role: Role
    cores: tuple[int, ...]

    @property
    def num_cpus(self) -> int:
        """CPUs that the worker asks for; at least one."""
        return max(1, len(self.cores))

    @property
    def bundle(self) -> dict[str, float]:
        """The worker's resource demand: the one bundle of its placement group."""
        return {"CPU": float(self.num_cpus), RESOURCE[self.role]: 1.0}


def plan_placement(
    cores: Sequence[int], *, num_prefill: int, num_decode: int, pin: bool = True
) -> tuple[WorkerPlacement, ...]:
    """Places all workers, prefill first. `cores` are the usable core numbers; their order is kept."""
    sets = _core_sets(tuple(cores), num_prefill, num_decode) if pin else [()] * (num_prefill + num_decode)
    roles = [(Role.PREFILL, i) for i in range(num_prefill)] + [(Role.DECODE, i) for i in range(num_decode)]
    return tuple(
        WorkerPlacement(worker_id=WorkerId(f"{role}-{index}"), role=role, cores=chosen)
        for (role, index), chosen in zip(roles, sets, strict=True)
    )


def total_resources(workers: Sequence[WorkerPlacement]) -> dict[str, float]:
    """Sum of all demands: what a node must offer to hold every worker."""
    total: dict[str, float] = {}
    for worker in workers:
        for name, amount in worker.bundle.items():
            total[name] = total.get(name, 0.0) + amount
    return total


def _core_sets(cores: tuple[int, ...], num_prefill: int, num_decode: int) -> list[tuple[int, ...]]:
    num_workers = num_prefill + num_decode
    if len(cores) >= num_workers:
        return _spread(cores, num_workers)
    if len(cores) < 2:
        return [()] * num_workers
    for_prefill = -(-len(cores) * num_prefill // num_workers)
    for_prefill = min(max(1, for_prefill), len(cores) - 1)
    return _share(cores[:for_prefill], num_prefill) + _share(cores[for_prefill:], num_decode)


def _spread(cores: tuple[int, ...], num_workers: int) -> list[tuple[int, ...]]:
    """Disjoint runs of cores, the first ones longer by one where it does not come out even."""
    each, spare = divmod(len(cores), num_workers)
    sets, start = [], 0
    for index in range(num_workers):
        end = start + each + (index < spare)
        sets.append(cores[start:end])
        start = end
    return sets


def _share(cores: tuple[int, ...], num_workers: int) -> list[tuple[int, ...]]:
    """Cores of one pool: disjoint if possible, else one core each, used in turn."""
    if len(cores) >= num_workers:
        return _spread(cores, num_workers)
    return [(cores[index % len(cores)],) for index in range(num_workers)]
