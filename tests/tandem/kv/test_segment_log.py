"""Where blocks lie: examples of room and collection, and any order of filling, losing and collecting."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given, settings

from tandem.kv.segment_log import Place, Run, SegmentLog, runs
from tandem.types import BlockHash


def name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "big"))


def make_log(num_segments: int = 4, num_slots: int = 4) -> SegmentLog:
    return SegmentLog(num_segments * 100, 100, num_slots)


def fill(log: SegmentLog, *numbers: int) -> None:
    """Appends blocks; opens segments as they are needed."""
    for number in numbers:
        if not log.head_room:
            log.open(log.next_number)
        log.settle(name(number), log.reserve(1).place)
    log.check_invariants()


def test_neighbours_are_one_run_up_to_the_longest() -> None:
    places = [Place(1, 3), Place(1, 4), Place(1, 5), Place(1, 6), Place(2, 7), Place(1, 8), Place(1, 7)]
    assert runs(places, 3) == [
        Run(0, Place(1, 3), 3),
        Run(3, Place(1, 6), 1),
        Run(4, Place(2, 7), 1),
        Run(5, Place(1, 8), 1),
        Run(6, Place(1, 7), 1),
    ]
    assert runs([], 3) == []


@pytest.mark.parametrize(
    ("num_segments", "num_slots", "wanted"), [(1, 9, 0), (2, 1, 0), (3, 1, 1), (2, 8, 7), (9, 8, 56)]
)
def test_one_segment_and_an_eighth_of_the_rest_are_not_for_live_blocks(
    num_segments: int, num_slots: int, wanted: int
) -> None:
    assert make_log(num_segments, num_slots).max_live == wanted


def test_slots_are_given_out_side_by_side_until_the_head_is_full() -> None:
    log = make_log()
    log.open(0)
    assert log.reserve(3) == Run(0, Place(0, 0), 3)
    assert log.reserve(3) == Run(0, Place(0, 3), 1)
    assert log.head_room == 0


def test_a_reserved_slot_is_dead_until_it_is_settled() -> None:
    log = make_log()
    log.open(0)
    place = log.reserve(1).place
    assert log.live(0) == ()
    assert log.settle(name(1), place)
    assert log.live(0) == (name(1),)
    assert log.place(name(1)) == place


def test_a_block_that_is_settled_again_has_left_its_old_slot() -> None:
    log = make_log()
    fill(log, 1, 2, 3, 4, 1)
    assert log.place(name(1)) == Place(1, 0)
    assert log.live(0) == (name(2), name(3), name(4))


def test_nothing_settles_in_a_segment_that_is_gone() -> None:
    log = make_log()
    log.open(0)
    place = log.reserve(1).place
    log.drop(0)
    assert not log.settle(name(1), place)
    assert log.head_room == 0


def test_the_segment_with_least_that_lives_is_collected_and_a_full_one_never() -> None:
    log = make_log()
    fill(log, *range(12))
    assert log.victim() is None
    for number in (0, 5, 6):
        log.forget(name(number))
    assert log.victim() == 1
    log.forget(name(4))
    log.forget(name(7))
    assert log.dead() == (1,)


def test_a_new_segment_leaves_room_for_a_collection() -> None:
    log = make_log(num_segments=3)
    fill(log, *range(8))
    assert not log.may_open(for_collection=False)
    assert log.may_open(for_collection=True)
    log.forget(name(0))
    assert log.can_copy(0)
    log.open(log.next_number)
    assert log.can_copy(0)
    log.reserve(2)
    assert not log.can_copy(0)


def test_segments_found_after_a_restart_go_on_where_they_were() -> None:
    log = make_log()
    log.add(7, num_slots=6, num_bytes=130, next_slot=2)
    log.add(3, num_slots=4, num_bytes=100, next_slot=4)
    assert (log.head, log.head_room, log.used_bytes, log.next_number) == (7, 4, 230, 8)
    assert log.segments == (3, 7)
    assert log.reserve(9) == Run(0, Place(7, 2), 4)


@given(
    num_segments=st.integers(2, 6),
    num_slots=st.integers(1, 6),
    steps=st.lists(st.integers(0, 40), max_size=120),
)
@settings(max_examples=100, deadline=None)
def test_with_at_most_max_live_blocks_collection_always_finds_room(
    num_segments: int, num_slots: int, steps: list[int]
) -> None:
    log = make_log(num_segments, num_slots)
    assume(log.max_live)
    live: list[BlockHash] = []
    for number in steps:
        for dead in log.dead():
            log.drop(dead)
        while not log.head_room:
            if log.may_open(for_collection=False):
                log.open(log.next_number)
                continue
            victim = log.victim()
            assert victim is not None
            assert log.can_copy(victim)
            for moved in log.live(victim):
                if not log.head_room:
                    assert log.may_open(for_collection=True)
                    log.open(log.next_number)
                log.settle(moved, log.reserve(1).place)
            log.drop(victim)
        place = log.reserve(1).place
        if name(number) not in live and len(live) == log.max_live:
            log.forget(live.pop(number % len(live)))
        log.settle(name(number), place)
        live = [*(other for other in live if other != name(number)), name(number)]
        log.check_invariants()
        assert log.used_bytes <= log.capacity_bytes
