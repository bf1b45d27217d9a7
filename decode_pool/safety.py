"""Whether sequences that hold some blocks and may want more can all finish, one after another. Pure.

The banker's algorithm for one kind of resource (Dijkstra, EWD 623). A state is safe when there is an order in which
each sequence can get all it may still want from what is free and what those before it give back. Grants that keep the
state safe can never deadlock: somebody can always go on, and nobody need be dropped or preempted for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from tandem.types import BlockId


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """Blocks that one request holds, and the most that it can ever hold.

    `named` are those of them that other requests may hold too: only the last of these gives them back.
    """

    num_held: int
    num_most: int
    named: tuple[BlockId, ...] = ()


def is_safe(claims: Iterable[Claim], num_free: int) -> bool:
    """Whether all can finish: with one kind of resource, smallest remaining need first is always best.

    O(n log n) in claims, and linear in named blocks.
    """
    ordered = sorted(claims, key=lambda claim: claim.num_most - claim.num_held)
    holders = Counter(block for claim in ordered for block in claim.named)
    for claim in ordered:
        if claim.num_most - claim.num_held > num_free:
            return False
        num_free += claim.num_held - len(claim.named)
        for block in claim.named:
            holders[block] -= 1
            num_free += not holders[block]
    return True
