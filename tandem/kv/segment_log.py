"""Where a disk tier's blocks lie: fixed slots in segments that are written front to back and never twice. Pure.

A segment's slots die one by one as blocks are evicted; its bytes come back when its last live blocks are copied on and
it is dropped. One segment's worth of the capacity is kept for those copies, and an eighth of the rest stays unused by
live blocks, so that there is always a segment with enough dead slots to make copying worth it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tandem.types import BlockHash

SLACK = 8
"""One in so many slots is not for live blocks."""


class Place(NamedTuple):
    """One slot."""

    segment: int
    slot: int


class Run(NamedTuple):
    """Neighbouring slots, for one large read: `length` places of a list from its index `start` on."""

    start: int
    place: Place
    length: int


def runs(places: Sequence[Place], longest: int) -> list[Run]:
    """Cuts places, in their order, where the next one is not the neighbour; none is longer than `longest`."""
    found: list[Run] = []
    for index, place in enumerate(places):
        last = found[-1] if found else None
        if last is not None and last.length < longest and place == (last.place[0], last.place[1] + last.length):
            found[-1] = last._replace(length=last.length + 1)
        else:
            found.append(Run(index, place, 1))
    return found


@dataclass(slots=True)
class _Segment:
    num_slots: int
    num_bytes: int
    next_slot: int = 0
    live: dict[int, BlockHash] = field(default_factory=dict)


@dataclass(slots=True)
class SegmentLog:
    """Segments of one tier: the head is being filled, the others only lose blocks."""

    capacity_bytes: int
    """Bytes of all segments together, whatever they hold."""
    segment_bytes: int
    """Bytes of a new segment."""
    num_slots: int
    """Slots of a new segment."""
    head: int | None = None
    used_bytes: int = 0
    _next_number: int = 0
    _segments: dict[int, _Segment] = field(default_factory=dict)
    _places: dict[BlockHash, Place] = field(default_factory=dict)

    @property
    def max_live(self) -> int:
        """How many blocks may be live for collection always to find room; 0 where the capacity is too small for any."""
        slots = (self.capacity_bytes // self.segment_bytes - 1) * self.num_slots
        return max(0, slots - max(1, slots // SLACK))

    @property
    def segments(self) -> tuple[int, ...]:
        """Numbers of all segments, oldest first."""
        return tuple(sorted(self._segments))

    @property
    def next_number(self) -> int:
        """The number that the next new segment takes."""
        return self._next_number

    @property
    def head_room(self) -> int:
        """Free slots of the head."""
        if self.head is None:
            return 0
        segment = self._segments[self.head]
        return segment.num_slots - segment.next_slot

    def place(self, name: BlockHash) -> Place | None:
        """Where a block lies."""
        return self._places.get(name)

    def live(self, number: int) -> tuple[BlockHash, ...]:
        """Blocks that lie in a segment, by slot."""
        return tuple(name for _, name in sorted(self._segments[number].live.items()))

    def may_open(self, *, for_collection: bool) -> bool:
        """Whether one more segment fits; without `for_collection`, so that another one still would."""
        wanted = self.segment_bytes if for_collection else 2 * self.segment_bytes
        return self.used_bytes + wanted <= self.capacity_bytes

    def open(self, number: int) -> None:
        """A new head, empty."""
        self.add(number, num_slots=self.num_slots, num_bytes=self.segment_bytes, next_slot=0)

    def add(self, number: int, *, num_slots: int, num_bytes: int, next_slot: int) -> None:
        """A segment whose slots before `next_slot` are used. The one with the highest number is the head."""
        assert number not in self._segments
        self._segments[number] = _Segment(num_slots, num_bytes, next_slot)
        self.used_bytes += num_bytes
        self.head = max(self._segments)
        self._next_number = max(self._next_number, number + 1)

    def reserve(self, count: int) -> Run:
        """Up to `count` neighbouring slots of the head. They are used from here on, and dead until `settle`."""
        assert self.head is not None
        segment = self._segments[self.head]
        count = min(count, segment.num_slots - segment.next_slot)
        run = Run(0, Place(self.head, segment.next_slot), count)
        segment.next_slot += count
        return run

    def settle(self, name: BlockHash, place: Place) -> bool:
        """A block lies at a place now, and no longer where it was. False when the segment is gone."""
        segment = self._segments.get(place.segment)
        if segment is None:
            return False
        assert place.slot < segment.next_slot
        assert place.slot not in segment.live
        self.forget(name)
        segment.live[place.slot] = name
        self._places[name] = place
        return True

    def forget(self, name: BlockHash) -> Place | None:
        """The slot of a block is dead from here on; where it lay."""
        place = self._places.pop(name, None)
        if place is not None:
            del self._segments[place.segment].live[place.slot]
        return place

    def drop(self, number: int) -> None:
        """A segment without live blocks is gone."""
        segment = self._segments.pop(number)
        assert not segment.live, "live blocks in a dropped segment"
        self.used_bytes -= segment.num_bytes
        if self.head == number:
            self.head = None

    def dead(self) -> tuple[int, ...]:
        """Segments without live blocks, but for the head."""
        return tuple(number for number, segment in self._segments.items() if not segment.live and number != self.head)

    def victim(self) -> int | None:
        """The segment that costs least to collect: least of it is live. None when there is none with a dead slot."""
        full = {number: segment for number, segment in self._segments.items() if number != self.head or self._is_full}
        share = {number: len(segment.live) / segment.num_slots for number, segment in full.items()}
        best = min(share, key=lambda number: (share[number], number), default=None)
        return best if best is not None and share[best] < 1 else None

    def can_copy(self, number: int) -> bool:
        """Whether the live blocks of a segment find room elsewhere without dropping anything."""
        room = self.num_slots if self.may_open(for_collection=True) else 0
        return len(self._segments[number].live) <= room + (self.head_room if number != self.head else 0)

    def live_share(self, number: int) -> float:
        """Live slots of a segment over all of its slots."""
        segment = self._segments[number]
        return len(segment.live) / segment.num_slots

    @property
    def _is_full(self) -> bool:
        return self.head_room == 0

    def check_invariants(self) -> None:
        """Asserts that places, live slots and bytes agree."""
        places = {
            name: Place(number, slot)
            for number, segment in self._segments.items()
            for slot, name in segment.live.items()
        }
        assert places == self._places
        assert self.used_bytes == sum(segment.num_bytes for segment in self._segments.values())
        assert self.head is None or self.head == max(self._segments)
        for number, segment in self._segments.items():
            assert number < self._next_number
            assert all(slot < segment.next_slot <= segment.num_slots for slot in segment.live)
