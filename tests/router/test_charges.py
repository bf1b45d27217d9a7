"""A router's own load on a worker, and what a report adds to it."""

from __future__ import annotations

from router.charges import NUM_WINDOWS, Charge


def test_own_requests_count_at_once_and_not_twice_when_they_are_reported() -> None:
    charge = Charge()
    charge.add(num_tokens=100, num_blocks=7, num_requests=1)
    assert (charge.total_tokens(0), charge.total_blocks(0)) == (100, 7)
    assert (charge.total_tokens(100), charge.total_blocks(7)) == (100, 7)


def test_what_others_have_there_is_added() -> None:
    charge = Charge()
    charge.add(num_tokens=100, num_blocks=7, num_requests=1)
    assert (charge.total_tokens(150), charge.total_blocks(10)) == (150, 10)


def test_a_late_report_of_own_requests_that_have_ended_is_not_load() -> None:
    charge = Charge()
    charge.add(num_tokens=100, num_blocks=7, num_requests=1)
    charge.add(num_tokens=-100, num_blocks=-7, num_requests=-1)
    charge.roll()
    assert charge.total_blocks(7) == 0
    for _ in range(NUM_WINDOWS):
        charge.roll()
    assert charge.total_blocks(7) == 7


def test_blocks_that_a_request_finds_are_no_load_and_not_taken_for_others_when_they_are_reported() -> None:
    charge = Charge()
    charge.add(num_tokens=10, num_blocks=2, num_requests=1, num_cached_tokens=90, num_held_blocks=5)
    assert (charge.total_tokens(100), charge.total_blocks(7)) == (10, 2)
    charge.add(num_tokens=-10, num_blocks=-2, num_requests=-1, num_cached_tokens=-90, num_held_blocks=-5)
    charge.roll()
    assert (charge.total_tokens(100), charge.total_blocks(7)) == (0, 0), "a late report of it"
