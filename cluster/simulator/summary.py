"""What a simulation comes to: figures of latency, throughput, transfer and use, by name. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cluster.simulator.life import Life
from cluster.simulator.world import OVERLOADED, Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class Slo:
    """What clients were promised: a request attains it when its TTFT and its mean TBT are both within."""

    ttft_s: float = math.inf
    tbt_s: float = math.inf

    def is_met(self, life: Life) -> bool:
        """By a request that is complete."""
        return life.ttft_s <= self.ttft_s and life.mean_tbt_s <= self.tbt_s


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of the sorted `values` that is not below `share` of them; NaN of none."""
    if not values:
        return math.nan
    return values[max(0, math.ceil(share * len(values)) - 1)]


def figures_of(outcome: Outcome, slo: Slo | None = None) -> dict[str, float]:
    """Seconds, bytes and shares by name; percentiles are over requests, those of `tbt` over tokens."""
    lives = [life for life in outcome.lives if life.is_complete]
    figures = {
        "requests": float(len(outcome.lives)),
        "refused": float(sum(bool(life.refused) for life in outcome.lives)),
        "overloaded": float(sum(life.refused == OVERLOADED for life in outcome.lives)),
        "duration_s": outcome.duration_s,
        **_throughput(lives, outcome.duration_s),
        **_percentiles("ttft", (life.ttft_s for life in lives)),
        **_percentiles("tbt", outcome.gaps_s),
        **_percentiles("queue", (life.queue_s for life in lives)),
        **_percentiles("prefill", (life.prefill_s for life in lives)),
        **_transfer(lives, outcome),
    }
    for pool, usage in outcome.usage.items():
        figures[f"{pool}_busy"] = usage.share(outcome.duration_s)
        figures[f"{pool}_tokens_per_iteration"] = usage.tokens_per_iteration
    if slo is not None:
        met = sum(slo.is_met(life) for life in lives)
        figures["slo_attained"] = met / len(outcome.lives) if outcome.lives else math.nan
        figures["goodput_per_s"] = met / outcome.duration_s if outcome.duration_s else 0.0
    return figures


def _percentiles(name: str, values: Iterable[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"{name}_p{round(100 * share)}_s": percentile(ordered, share) for share in (0.5, 0.9, 0.99)}


def _throughput(lives: Sequence[Life], duration_s: float) -> dict[str, float]:
    prompt = sum(life.num_prompt_tokens for life in lives)
    cached = sum(life.num_cached_tokens for life in lives)
    output = sum(life.num_output_tokens for life in lives)
    return {
        "requests_per_s": len(lives) / duration_s if duration_s else 0.0,
        "prompt_tokens_per_s": prompt / duration_s if duration_s else 0.0,
        "output_tokens_per_s": output / duration_s if duration_s else 0.0,
        "cached_share": cached / prompt if prompt else 0.0,
    }


def _transfer(lives: Sequence[Life], outcome: Outcome) -> dict[str, float]:
    moved = [life for life in lives if life.num_messages]
    held = sum(life.num_held_bytes for life in lives)
    all_bytes = held + outcome.num_sent_bytes
    return {
        **_percentiles("exposed", (life.exposed_s for life in moved)),
        "exposed_over_prefill_p50": percentile(sorted(life.exposed_s / life.prefill_s for life in moved), 0.5),
        "sent_gb": outcome.num_sent_bytes / 1e9,
        "held_share": held / all_bytes if all_bytes else 0.0,
        "messages_per_handoff": outcome.num_messages / len(moved) if moved else 0.0,
    }
