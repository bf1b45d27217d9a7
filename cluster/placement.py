"""Where a worker goes: its cores, and what it asks of Ray's scheduler. Pure.

Cores are chosen for one worker at a time, from what the others hold: own cores while there are free ones, then cores
of the same pool, so that the two pools do not disturb each other; on a single core nobody is pinned.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tandem.config import ClusterConfig, DeviceKind
from tandem.types import Role, WorkerId

RESOURCE = {Role.PREFILL: "tandem_prefill", Role.DECODE: "tandem_decode"}
"""Name of each pool's custom resource: a node offers one unit for each rank it has room for."""

_NAME = re.compile(r"(?P<cluster>.+)/(?P<id>(?P<role>prefill|decode)-\d+)/g(?P<generation>\d+)/c(?P<cores>[\d.]*)")


def gpus_of_ranks(config: ClusterConfig) -> dict[Role, float]:
    """GPUs that each rank of a pool asks Ray for; a worker waits until it has them."""
    if config.model.device == "cpu":
        return {Role.PREFILL: 0.0, Role.DECODE: 0.0}
    return {Role.PREFILL: config.prefill.gpus_per_rank, Role.DECODE: config.decode.gpus_per_rank}


def gpus_of_all(config: ClusterConfig) -> float:
    """GPUs that the configured workers ask for together, on CPUs or not."""
    prefill, decode = config.prefill, config.decode
    of_prefill = prefill.num_workers * prefill.num_ranks * prefill.gpus_per_rank
    return of_prefill + decode.num_workers * decode.num_ranks * decode.gpus_per_rank


def with_device(config: ClusterConfig, *, num_gpus: float) -> ClusterConfig:
    """The configuration with "auto" decided, once for the whole cluster: GPUs where there are enough for all."""
    if config.model.device != "auto":
        return config
    device: DeviceKind = "cuda" if num_gpus > 0 and gpus_of_all(config) <= num_gpus else "cpu"
    return replace(config, model=replace(config.model, device=device))


@dataclass(frozen=True, kw_only=True, slots=True)
class Selector:
    """Which nodes may take a worker: pairs of a label and a condition in Ray's words (`("ray.io/zone", "in(a,b)")`)."""

    labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerPlacement:
    """One worker's place. `cores` is empty when the worker is not pinned; `num_ranks` is TP x PP."""

    worker_id: WorkerId
    role: Role
    generation: int = 0
    cores: tuple[int, ...] = ()
    num_ranks: int = 1
    selector: Selector = Selector()

    @property
    def bundles(self) -> list[dict[str, float]]:
        """What its placement group asks for: a bundle for each rank."""
        return [{RESOURCE[self.role]: 1.0} for _ in range(self.num_ranks)]

    def name(self, cluster: str) -> str:
        """All that a later controller must know of it, as the name of its placement group."""
        return f"{cluster}/{self.worker_id}/g{self.generation}/c{'.'.join(map(str, self.cores))}"


def parse_name(name: str, cluster: str) -> WorkerPlacement | None:
    """Inverse of `WorkerPlacement.name`, ranks and selector apart; None for what is not this cluster's."""
    match = _NAME.fullmatch(name)
    if match is None or match["cluster"] != cluster:
        return None
    return WorkerPlacement(
        worker_id=WorkerId(match["id"]),
        role=Role(match["role"]),
        generation=int(match["generation"]),
        cores=tuple(int(core) for core in match["cores"].split(".") if core),
    )


def choose_cores(
    role: Role, cores: Sequence[int], others: Sequence[WorkerPlacement], *, sizes: Mapping[Role, int]
) -> tuple[int, ...]:
    """Cores for one more worker of `role`. `cores` are the usable ones, `others` the workers that are there.

    A worker gets its even share of the free cores for pools of `sizes`. It never takes the last free core from a pool
    that is wanted and has none yet. Without a free core it shares the least used one, its own pool's first.
    """
    if len(cores) < 2:
        return ()
    free = [core for core in cores if not any(core in other.cores for other in others)]
    rival = Role.DECODE if role is Role.PREFILL else Role.PREFILL
    rival_waits = sizes.get(rival, 0) > 0 and not any(o.cores for o in others if o.role is rival)
    num_own = min(len(free) - rival_waits, _even_share(role, len(cores), others, sizes=sizes))
    return tuple(free[:num_own]) if num_own > 0 else _shared(role, cores, others, reserved=set(free))


def _even_share(role: Role, num_cores: int, others: Sequence[WorkerPlacement], *, sizes: Mapping[Role, int]) -> int:
    """An equal part of all cores; what does not come out even goes to the first workers, prefill first."""
    num_workers = max(1, sum(sizes.values()))
    each, spare = divmod(num_cores, num_workers)
    rank = sum(other.role is role for other in others) + (sizes.get(Role.PREFILL, 0) if role is Role.DECODE else 0)
    return max(1, each + (rank < spare))


def _shared(
    role: Role, cores: Sequence[int], others: Sequence[WorkerPlacement], *, reserved: set[int]
) -> tuple[int, ...]:
    def cost(core: int) -> tuple[bool, int]:
        users = [other.role for other in others if core in other.cores]
        return (any(user is not role for user in users), len(users))

    taken = [core for core in cores if core not in reserved] or list(cores)
    return (min(taken, key=cost),)
