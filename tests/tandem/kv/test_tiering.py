"""What is loaded from where, by example."""

from __future__ import annotations

import pytest

from tandem.kv.tiering import (
    ASSUMED_BYTES_PER_S,
    STALE_S,
    TRIAL_BLOCKS,
    Prefix,
    Tier,
    TierGauge,
    TierSpeed,
    best_peer,
    plan_load,
    writes_down,
)

MB = 1_000_000
FAST, SLOW = TierSpeed(bytes_per_s=10e9), TierSpeed(bytes_per_s=0.05e9)


def prefix(*, host: int = 0, disk: int = 0, remote: int = 0, present: int = 0, ms_per_block: float = 10.0) -> Prefix:
    """Blocks of 1 MB and 16 tokens."""
    return Prefix(
        block_bytes=MB,
        block_tokens=16,
        compute_s_per_token=ms_per_block / 1000 / 16,
        found={Tier.HOST: host, Tier.DISK: disk, Tier.REMOTE: remote},
        num_present=present,
    )


def speeds(host: TierSpeed | None = FAST, disk: TierSpeed | None = FAST, remote: TierSpeed | None = FAST):  # type: ignore[no-untyped-def]
    return {Tier.HOST: host, Tier.DISK: disk, Tier.REMOTE: remote}


def test_everything_is_loaded_when_every_tier_is_faster_than_computing() -> None:
    plan = plan_load(prefix(host=5, disk=8, remote=20), speeds())
    assert (plan.num_blocks, plan.last_tier) == (20, Tier.REMOTE)
    assert plan.load_s == pytest.approx(20e-3 / 10)
    assert plan.saved_s == pytest.approx(0.2)


def test_loading_ends_before_a_tier_that_is_slower_than_computing() -> None:
    plan = plan_load(prefix(host=5, disk=8, remote=20), speeds(remote=SLOW))
    assert (plan.num_blocks, plan.last_tier) == (8, Tier.DISK)


def test_nothing_is_loaded_when_computing_is_quicker_than_the_nearest_tier() -> None:
    plan = plan_load(prefix(host=5, ms_per_block=0.01), speeds(host=SLOW))
    assert (plan.num_blocks, plan.last_tier) == (0, Tier.DEVICE)


def test_a_slow_tier_is_worth_it_when_a_quick_one_behind_it_has_the_rest() -> None:
    plan = plan_load(prefix(disk=1, remote=100), speeds(disk=TierSpeed(bytes_per_s=0.08e9)))
    assert plan.num_blocks == 100


def test_latency_makes_a_short_load_not_worth_it() -> None:
    far = TierSpeed(bytes_per_s=10e9, latency_s=0.1)
    assert plan_load(prefix(remote=2), speeds(remote=far)).num_blocks == 0
    assert plan_load(prefix(remote=50), speeds(remote=far)).num_blocks == 50


def test_blocks_that_are_there_already_are_neither_loaded_nor_saved() -> None:
    plan = plan_load(prefix(host=5, present=5), speeds())
    assert (plan.num_blocks, plan.load_s, plan.saved_s) == (5, 0.0, 0.0)


def test_a_tier_of_unknown_speed_is_taken_to_be_slow_of_its_kind() -> None:
    plan = plan_load(prefix(host=5, disk=100, remote=200), speeds(disk=None))
    assert (plan.num_blocks, plan.last_tier) == (200, Tier.REMOTE)
    assert plan.load_s == pytest.approx(95e6 / ASSUMED_BYTES_PER_S[Tier.DISK] + 105e6 / 10e9)


def test_where_that_would_be_too_slow_it_is_tried_with_a_few_blocks() -> None:
    plan = plan_load(prefix(host=5, disk=100, remote=200, ms_per_block=0.5), speeds(disk=None))
    assert (plan.num_blocks, plan.last_tier) == (5 + TRIAL_BLOCKS, Tier.DISK)
    plan = plan_load(prefix(host=5, disk=7, ms_per_block=0.5), speeds(disk=None))
    assert plan.num_blocks == 7


def test_a_tier_that_is_about_as_quick_as_computing_stays_as_it_is() -> None:
    even = TierSpeed(bytes_per_s=0.1e9 * 0.9)
    assert plan_load(prefix(disk=10), speeds(disk=even)).num_blocks == 10
    assert plan_load(prefix(disk=10), speeds(disk=even), in_use=frozenset({Tier.HOST})).num_blocks == 0


def test_a_gauge_follows_what_it_measures_and_forgets_it() -> None:
    gauge = TierGauge()
    assert gauge.speed(0.0) is None
    gauge.observe(100 * MB, 0.1, now=1.0)
    first = gauge.speed(1.0)
    assert first is not None
    assert first.bytes_per_s == pytest.approx(1e9)
    gauge.observe(100 * MB, 1.0, now=2.0)
    slower = gauge.speed(2.0)
    assert slower is not None
    assert 0.1e9 < slower.bytes_per_s < 1e9
    assert gauge.speed(2.0 + STALE_S + 1) is None


def test_a_small_load_says_little_about_a_tier() -> None:
    gauge = TierGauge()
    gauge.observe(1000 * MB, 1.0, now=0.0)
    gauge.observe(MB, 0.01, now=1.0)
    speed = gauge.speed(1.0)
    assert speed is not None
    assert speed.bytes_per_s == pytest.approx(1e9, rel=0.02)


def test_the_peer_that_adds_most_is_asked_and_only_for_its_host_tier() -> None:
    holders = {"a": {"host": 4}, "b": {"host": 6, "disk": 90}, "c": {"host": 6}, "d": {"disk": 50}}
    assert best_peer(holders, have=3) == ("b", 6)
    assert best_peer(holders, have=6) is None
    assert best_peer({}, have=0) is None


def test_blocks_go_to_disk_once_and_when_the_policy_says() -> None:
    assert writes_down("through", evicted=False, on_disk=False)
    assert not writes_down("through", evicted=True, on_disk=False)
    assert writes_down("on_eviction", evicted=True, on_disk=False)
    assert not writes_down("on_eviction", evicted=False, on_disk=False)
    assert not writes_down("through", evicted=False, on_disk=True)
