"""Which pods a Deployment or a StatefulSet makes and which it ends next, given those it has. Decides only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class PodFacts:
    """What a decision needs to know of a pod. `revision` says from which template it was made."""

    name: str
    revision: str
    is_available: bool
    is_ending: bool = False
    ordinal: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What to do now: so many new pods (Deployment), or those ordinals (StatefulSet), and whom to end."""

    num_new: int = 0
    new_ordinals: tuple[int, ...] = ()
    end: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """How far a rolling update may leave the wished number of replicas, as numbers of pods."""

    max_surge: int
    max_unavailable: int

    @classmethod
    def of(cls, replicas: int, max_surge: int | str, max_unavailable: int | str) -> Bounds:
        """From a spec: percentages of surge are rounded up, those of unavailability down; both may not be nothing."""
        surge = _number(max_surge, replicas, is_rounded_up=True)
        unavailable = _number(max_unavailable, replicas, is_rounded_up=False)
        return cls(max_surge=surge, max_unavailable=unavailable if surge or unavailable else 1)


def _number(value: int | str, replicas: int, *, is_rounded_up: bool) -> int:
    if isinstance(value, int):
        return value
    share = int(value.removesuffix("%")) * replicas / 100
    return math.ceil(share) if is_rounded_up else math.floor(share)


def deployment_step(pods: Sequence[PodFacts], *, replicas: int, revision: str, bounds: Bounds) -> Step:
    """The next step of a rolling update, or of a change of size; nothing when all is as wished."""
    living = [pod for pod in pods if not pod.is_ending]
    new = [pod for pod in living if pod.revision == revision]
    old = [pod for pod in living if pod.revision != revision]
    num_new = max(0, min(replicas - len(new), replicas + bounds.max_surge - len(living)))
    superfluous = _first_to_go(new)[: max(0, len(new) - replicas)]
    going = [*superfluous, *_replaceable(old, new, replicas, bounds)]
    return Step(num_new=num_new, end=tuple(pod.name for pod in going))


def _replaceable(
    old: Sequence[PodFacts], new: Sequence[PodFacts], replicas: int, bounds: Bounds
) -> list[PodFacts]:
    """Old pods that may go: those that serve nobody at once, of the others as many as can be missed."""
    broken = [pod for pod in old if not pod.is_available]
    num_available = sum(pod.is_available for pod in [*old, *new])
    num_spare = max(0, num_available - (replicas - bounds.max_unavailable))
    return broken + [pod for pod in old if pod.is_available][:num_spare]


def _first_to_go(pods: Sequence[PodFacts]) -> list[PodFacts]:
    """Not available ones first, then the youngest."""
    youngest_first = list(pods)
    youngest_first.reverse()
    return sorted(youngest_first, key=lambda pod: pod.is_available)


def recreate_step(pods: Sequence[PodFacts], *, replicas: int, revision: str) -> Step:
    """The same for the strategy Recreate: the old pods are gone before a new one is made."""
    old = [pod for pod in pods if pod.revision != revision]
    if old:
        return Step(end=tuple(pod.name for pod in old if not pod.is_ending))
    return deployment_step(
        pods, replicas=replicas, revision=revision, bounds=Bounds(max_surge=0, max_unavailable=replicas)
    )


def stateful_step(
    pods: Sequence[PodFacts], *, replicas: int, revision: str, partition: int = 0, is_parallel: bool = False
) -> Step:
    """A StatefulSet's next step: missing ordinals upwards, superfluous ones downwards, updates one at a time."""
    by_ordinal = {pod.ordinal: pod for pod in pods}
    surplus = [pod for pod in sorted(pods, key=lambda pod: -pod.ordinal) if pod.ordinal >= replicas]
    missing = [ordinal for ordinal in range(replicas) if ordinal not in by_ordinal]
    if is_parallel:
        step = Step(new_ordinals=tuple(missing), end=tuple(pod.name for pod in surplus if not pod.is_ending))
    else:
        step = _ordered_step(by_ordinal, replicas, surplus)
    if step.new_ordinals or step.end or surplus or missing:
        return step
    return _update_step([by_ordinal[ordinal] for ordinal in range(partition, replicas)], pods, revision)


def _ordered_step(by_ordinal: dict[int, PodFacts], replicas: int, surplus: Sequence[PodFacts]) -> Step:
    for ordinal in range(replicas):
        pod = by_ordinal.get(ordinal)
        if pod is None:
            return Step(new_ordinals=(ordinal,))
        if not pod.is_available:
            return Step()
    if surplus and not any(pod.is_ending for pod in surplus):
        return Step(end=(surplus[0].name,))
    return Step()


def _update_step(updatable: Sequence[PodFacts], pods: Sequence[PodFacts], revision: str) -> Step:
    """Ends the highest pod of an old template, while all the others serve. A broken old pod may go at any time."""
    old = [pod for pod in reversed(updatable) if pod.revision != revision and not pod.is_ending]
    if not old:
        return Step()
    others = [pod for pod in pods if pod is not old[0]]
    return Step(end=(old[0].name,)) if all(pod.is_available and not pod.is_ending for pod in others) else Step()
