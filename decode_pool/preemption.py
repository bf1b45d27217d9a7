"""Which running requests make room for one that waits before them. Pure.

One that waits may take the blocks of those behind it in the order, by at least a level of priority: from the last on,
as few as make its grant safe, and only those that host memory has room for. Where all of them together would not
be enough, none is taken.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from decode_pool.group import DecodeGroup, Phase
from decode_pool.safety import is_safe
from tandem.types import PRIORITY_S, BlockId


@dataclass(frozen=True, kw_only=True, slots=True)
class Want:
    """What the first that waits lacks: `num_blocks` blocks, and references to `found`, which have its KV already."""

    group: DecodeGroup
    num_blocks: int
    found: tuple[BlockId, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """What is free: blocks on the device, slots in host memory."""

    num_blocks: int
    num_slots: int


def choose_victims(want: Want, groups: Collection[DecodeGroup], room: Room) -> tuple[DecodeGroup, ...]:
    """Who is to be swapped out, the last in order first; nobody when that does not help, or is not needed."""
    last_s = want.group.request.order_s + PRIORITY_S
    behind = [g for g in groups if g.phase is Phase.DELIVERED and g.request.order_s >= last_s]
    behind.sort(key=lambda group: group.request.order_s, reverse=True)
    fitting = _fitting(behind, room.num_slots)
    if not fitting or not _is_enough(want, groups, fitting, room) or _is_enough(want, groups, (), room):
        return ()
    prefixes = (fitting[:count] for count in range(1, len(fitting)))
    return tuple(next((few for few in prefixes if _is_enough(want, groups, few, room)), fitting))


def _fitting(groups: Sequence[DecodeGroup], num_slots: int) -> list[DecodeGroup]:
    """Those that host memory has room for together."""
    fitting = []
    for group in groups:
        if (num_needed := len(group.filled)) <= num_slots:
            fitting.append(group)
            num_slots -= num_needed
    return fitting


def _is_enough(
    want: Want, groups: Collection[DecodeGroup], leaving: Sequence[DecodeGroup], room: Room
) -> bool:
    """Whether the grant would be safe without those that leave."""
    gone = {group.request.request_id for group in leaving}
    others = [g for g in groups if g.num_held and g is not want.group and g.request.request_id not in gone]
    kept = {block for group in (*others, want.group) for block in group.counts}
    freed = {block for group in leaving for block in group.counts} - kept
    num_free = room.num_blocks + len(freed) - len(set(want.found) - kept) - want.num_blocks
    claim = want.group.claim
    own = replace(
        claim,
        num_held=claim.num_held + len(want.found) + want.num_blocks,
        named=(*claim.named, *want.found),
    )
    return num_free >= 0 and is_safe([*(g.claim for g in others), own], num_free)
