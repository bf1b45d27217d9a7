"""What to load, from which tier, and what to write down: the prefix store's decisions. Pure.

One rule for loading (Mooncake's): a block is loaded when that takes less time than computing it. A prefix is loaded
front to back, so the choice is how many leading blocks: up to where the host's, the disk's or a peer's end, or none.
Speeds are measured. A tier that was never tried, or not for long, is taken to be as slow as its kind is at its worst;
where that is too slow, it is tried with a few blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


class Tier(StrEnum):
    """Where a block can be, nearest first."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    REMOTE = "remote"


LOADED_FROM = (Tier.HOST, Tier.DISK, Tier.REMOTE)

WritePolicy = Literal["through", "on_eviction"]
"""When host blocks go to disk: as soon as they are committed, or when they make room for others."""

ASSUMED_BYTES_PER_S = {Tier.HOST: 1e9, Tier.DISK: 2e8, Tier.REMOTE: 1e8}
"""Of a tier whose speed is not known."""
TRIAL_BLOCKS = 16
"""Blocks that are loaded from a tier of unknown speed: enough to measure it, few enough to be no great loss."""
STALE_S = 60.0
"""A speed that was not measured for so long is not believed to be too slow any more."""
MARGIN = 1.2
"""A tier in use is left when it is so much slower than computing, one out of use taken up when it is so much faster."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TierSpeed:
    """What was measured of one tier."""

    bytes_per_s: float
    latency_s: float = 0.0

    def seconds(self, num_bytes: float) -> float:
        """One load of so many bytes."""
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclass(slots=True)
class TierGauge:
    """Measures one tier from its loads, newest counting most, and large ones more than small ones.

    Times are on one clock, in seconds.
    """

    smoothing: float = 0.3
    _bytes: float = 0.0
    _seconds: float = 0.0
    _measured_s: float = 0.0

    def observe(self, num_bytes: int, seconds: float, now: float) -> None:
        """One load has ended; latency is part of its speed."""
        if num_bytes <= 0 or seconds <= 0:
            return
        newest = self.smoothing if self._seconds > 0 else 1.0
        self._bytes += newest * (num_bytes - self._bytes)
        self._seconds += newest * (seconds - self._seconds)
        self._measured_s = now

    def speed(self, now: float) -> TierSpeed | None:
        """None when never measured, or not for STALE_S."""
        if self._seconds <= 0 or now - self._measured_s > STALE_S:
            return None
        return TierSpeed(bytes_per_s=self._bytes / self._seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefix:
    """A prompt's full blocks and how many leading ones can be had: `found` counts from the first, per tier."""

    block_bytes: int
    block_tokens: int
    compute_s_per_token: float
    found: Mapping[Tier, int]
    num_present: int = 0
    """Leading blocks that need no loading."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadPlan:
    """Load leading blocks up to `num_blocks`; `last_tier` is the farthest asked. The seconds are what is expected."""

    num_blocks: int
    last_tier: Tier
    load_s: float
    saved_s: float


def plan_load(
    prefix: Prefix, speeds: Mapping[Tier, TierSpeed | None], *, in_use: frozenset[Tier] = frozenset(LOADED_FROM)
) -> LoadPlan:
    """How far to load. `speeds` without a tier, or None for it: unknown. `in_use`: tiers that the last plan used."""
    best = LoadPlan(num_blocks=prefix.num_present, last_tier=Tier.DEVICE, load_s=0.0, saved_s=0.0)
    num_blocks, load_s, saved_s = prefix.num_present, 0.0, 0.0
    for tier in LOADED_FROM:
        count = prefix.found.get(tier, 0) - num_blocks
        if count <= 0:
            continue
        speed = speeds.get(tier) or TierSpeed(bytes_per_s=ASSUMED_BYTES_PER_S[tier])
        saved_s += count * prefix.block_tokens * prefix.compute_s_per_token
        load_s += speed.seconds(count * prefix.block_bytes)
        num_blocks += count
        factor = MARGIN if tier in in_use else 1 / MARGIN
        if load_s - best.load_s <= factor * (saved_s - best.saved_s):
            best = LoadPlan(num_blocks=num_blocks, last_tier=tier, load_s=load_s, saved_s=saved_s)
        elif speeds.get(tier) is None:
            return _trial(prefix, best, tier)
    return best


def _trial(prefix: Prefix, best: LoadPlan, tier: Tier) -> LoadPlan:
    """`best` and a few blocks of the next tier, to learn its speed. Nothing follows them: a prefix has no holes."""
    count = min(prefix.found[tier] - best.num_blocks, TRIAL_BLOCKS)
    saved_s = best.saved_s + count * prefix.block_tokens * prefix.compute_s_per_token
    return LoadPlan(num_blocks=best.num_blocks + count, last_tier=tier, load_s=best.load_s, saved_s=saved_s)


def best_peer(holders: Mapping[str, Mapping[str, int]], *, have: int, least: int = 1) -> tuple[str, int] | None:
    """(peer, leading blocks in its host tier) that adds most to the `have` we have; None below `least` more.

    `holders` is what `PrefixIndex.match` gives. Equal ones: the first by name, so that callers agree.
    """
    counts = {peer: tiers.get(Tier.HOST, 0) for peer, tiers in holders.items()}
    peer = min(counts, key=lambda one: (-counts[one], one), default=None)
    if peer is None or counts[peer] - have < least:
        return None
    return peer, counts[peer]


def writes_down(policy: WritePolicy, *, evicted: bool, on_disk: bool) -> bool:
    """Whether a host block goes to disk now: when it was `evicted`, or else when it was just committed."""
    return not on_disk and evicted == (policy == "on_eviction")
