"""Whether sequences that hold some blocks and may want more can all finish, one after another. Pure.

The banker's algorithm for one kind of resource (Dijkstra, EWD 623). A state is safe when there is an order in which
each sequence can get all it may still want from what is free and what those before it give back. Grants that keep the
state safe can never deadlock: somebody can always go on, without preemption and without dropping anyone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """Blocks that one sequence holds, and the most that it can ever hold."""

    num_held: int
    num_most: int


def is_safe(claims: Iterable[Claim], num_free: int) -> bool:
    """Whether all can finish. O(n log n): with one kind of resource, smallest remaining need first is always best."""
    for claim in sorted(claims, key=lambda claim: claim.num_most - claim.num_held):
        if claim.num_most - claim.num_held > num_free:
            return False
        num_free += claim.num_held
    return True
