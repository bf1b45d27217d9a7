"""What clients ask of a simulated cluster: arrivals, lengths and shared prefixes, drawn or from a trace. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from random import Random
from typing import Any

from tandem.errors import ConfigError
from tandem.types import BlockHash

TRACE_BLOCK_TOKENS = 512
"""Tokens that one `hash_ids` entry of a trace stands for."""
_MOST = 2**63 - 1
"""What a number in a trace may be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """One request. Equal `prefix_ids`, from the first on, mean equal tokens, `TRACE_BLOCK_TOKENS` for each."""

    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    prefix_ids: tuple[int, ...] = ()

    def block_names(self, block_size: int, *, number: int) -> tuple[BlockHash, ...]:
        """Names of all full blocks of the prompt; those that the ids do not cover are of request `number` alone.

        `block_size` divides what an id stands for.
        """
        each = TRACE_BLOCK_TOKENS // block_size
        count = self.num_prompt_tokens // block_size
        shared = min(count, len(self.prefix_ids) * each)
        paths = _paths(self.prefix_ids)
        known = (_name(paths[index // each], index % each) for index in range(shared))
        own = (_name(_OWN + number.to_bytes(8, "little"), index) for index in range(shared, count))
        return (*known, *own)


_OWN = b"request "


def _paths(prefix_ids: Iterable[int]) -> list[bytes]:
    """A name for each id and all ids before it: a trace may use one id behind different ones."""
    state, paths = blake2b(digest_size=16), []
    for prefix_id in prefix_ids:
        state.update(prefix_id.to_bytes(16, "little", signed=True))
        paths.append(state.digest())
    return paths


def _name(path: bytes, part: int) -> BlockHash:
    return BlockHash(path + part.to_bytes(8, "little"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Numbers of tokens with a mean and, as a share of it, a standard deviation: log-normal, and never below 1."""

    mean: float
    spread: float = 0.0

    def draw(self, rng: Random) -> int:
        """One of them."""
        if not self.spread:
            return max(1, round(self.mean))
        sigma = math.sqrt(math.log1p(self.spread**2))
        return max(1, round(rng.lognormvariate(math.log(self.mean) - sigma**2 / 2, sigma)))


def poisson(rng: Random, *, rate_per_s: float, num_requests: int, prompt: Lengths, output: Lengths) -> list[Arrival]:
    """Requests that come independently of each other and share nothing."""
    arrivals, at_s = [], 0.0
    for _ in range(num_requests):
        at_s += rng.expovariate(rate_per_s)
        arrivals.append(Arrival(at_s=at_s, num_prompt_tokens=prompt.draw(rng), num_output_tokens=output.draw(rng)))
    return arrivals


def from_trace(
    rows: Iterable[Mapping[str, Any]], rng: Random, *, speed: float = 1.0, quantum_s: float = 0.0
) -> list[Arrival]:
    """A published trace: `timestamp` (ms), `input_length`, `output_length`, `hash_ids`.

    Time begins with the earliest timestamp, whatever it counts from. Arrivals are spread over the quantum to which they
    are rounded; with `speed` 2 they come twice as fast. Raises ConfigError that names the first row which is not of
    this form.
    """
    arrivals = [_arrival(number, row) for number, row in enumerate(rows)]
    first_s = min((arrival.at_s for arrival in arrivals), default=0.0)
    spread = (
        replace(arrival, at_s=(arrival.at_s - first_s + rng.uniform(0.0, quantum_s)) / speed) for arrival in arrivals
    )
    return sorted(spread, key=lambda arrival: arrival.at_s)


def _arrival(number: int, row: Mapping[str, Any]) -> Arrival:
    """At the time that the row itself says."""
    try:
        return Arrival(
            at_s=_number(row, "timestamp") / 1000,
            num_prompt_tokens=_tokens(row, "input_length"),
            num_output_tokens=_tokens(row, "output_length"),
            prefix_ids=_ids(row.get("hash_ids") or []),
        )
    except ValueError as exc:
        raise ConfigError(f"row {number + 1} of the trace cannot be read: {exc}", param="trace") from exc


def _number(row: Mapping[str, Any], name: str) -> float:
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _MOST:
        raise ValueError(f"{name} must be a number, got {_shortened(value)}")
    return value


def _tokens(row: Mapping[str, Any], name: str) -> int:
    value = _number(row, name)
    if value < 1 or value != int(value):
        raise ValueError(f"{name} must be a whole number of tokens, 1 or more, got {_shortened(value)}")
    return int(value)


def _ids(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(value) is int and abs(value) <= _MOST for value in values):
        raise ValueError(f"hash_ids must be a list of whole numbers, got {_shortened(values)}")
    return tuple(values)


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
