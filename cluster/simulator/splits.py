"""How a number of workers is best cut into two pools, or left in one: every cut tried on the same arrivals. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from cluster.simulator.plant import Plant
from cluster.simulator.summary import Slo, figures_of
from cluster.simulator.workload import Arrival
from cluster.simulator.world import World
from tandem.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """One cut and what came of it. No workers in either pool: all of them do both."""

    num_prefill: int
    num_decode: int
    figures: dict[str, float]

    @property
    def is_colocated(self) -> bool:
        """Whether there are no pools."""
        return not self.num_prefill

    @property
    def label(self) -> str:
        """For people."""
        return "colocated" if self.is_colocated else f"{self.num_prefill} + {self.num_decode}"


def try_splits(plant: Plant, arrivals: Sequence[Arrival], *, num_workers: int, slo: Slo) -> Iterator[Split]:
    """Every cut of `num_workers` workers, and the same workers colocated, one after another.

    Raises ConfigError for fewer than two workers.
    """
    if num_workers < 2:
        raise ConfigError(f"workers to split must be 2 or more, got {num_workers}", param="workers")
    for num_prefill in range(1, num_workers):
        cut = _with_workers(plant, num_prefill, num_workers - num_prefill)
        figures = figures_of(World(cut).run(arrivals), slo)
        yield Split(num_prefill=num_prefill, num_decode=num_workers - num_prefill, figures=figures)
    outcome = World(_with_workers(plant, 1, num_workers - 1), is_colocated=True).run(arrivals)
    yield Split(num_prefill=0, num_decode=0, figures=figures_of(outcome, slo))


def _with_workers(plant: Plant, num_prefill: int, num_decode: int) -> Plant:
    config = plant.config
    prefill = replace(config.prefill, num_workers=num_prefill)
    decode = replace(config.decode, num_workers=num_decode)
    return replace(plant, config=replace(config, prefill=prefill, decode=decode))


def best_of(splits: Sequence[Split]) -> Split:
    """The one that keeps the promise most often; of equal ones that with the lower p99 of TBT, by which it is kept best
    where it is kept at all."""
    return max(splits, key=lambda split: (split.figures["slo_attained"], -split.figures["tbt_p99_s"]))
