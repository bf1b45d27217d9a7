"""What clients ask of a simulated cluster: arrivals, lengths and shared prefixes, drawn or from a trace. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from random import Random
from typing import Any

from tandem.errors import ConfigError
from tandem.types import BlockHash

TRACE_BLOCK_TOKENS = 512
"""Tokens that one `hash_ids` entry of a trace stands for."""
TRACE_QUANTUM_S = 3.0
"""To which the arrivals of the published trace are rounded."""


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
    rows: Iterable[Mapping[str, Any]], rng: Random, *, speed: float = 1.0, quantum_s: float = TRACE_QUANTUM_S
) -> list[Arrival]:
    """A published trace: `timestamp` (ms), `input_length`, `output_length`, `hash_ids`.

    Arrivals are spread over the quantum to which they are rounded; with `speed` 2 they come twice as fast. Raises
    ConfigError that names the first row which is not of this form.
    """
    arrivals = [_arrival(number, row, rng.uniform(0.0, quantum_s), speed) for number, row in enumerate(rows)]
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


def _arrival(number: int, row: Mapping[str, Any], jitter_s: float, speed: float) -> Arrival:
    try:
        return Arrival(
            at_s=(float(row["timestamp"]) / 1000 + jitter_s) / speed,
            num_prompt_tokens=_positive(row["input_length"]),
            num_output_tokens=_positive(row["output_length"]),
            prefix_ids=_ids(row.get("hash_ids", ())),
        )
    except (KeyError, TypeError, ValueError) as exc:
        raise ConfigError(f"row {number + 1} of the trace cannot be read: {exc!r}", param="trace") from exc


def _positive(value: Any) -> int:
    if int(value) < 1:
        raise ValueError(f"{value} tokens")
    return int(value)


def _ids(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(int(value) for value in values)
