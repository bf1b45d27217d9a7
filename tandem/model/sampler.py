"""Chooses tokens from logits. A choice depends on (logits, parameters, output position) alone, never on the batch.

The noise of a token at output position i is a counter-based function of (seed, i, token), so a request gives the same
tokens on whatever worker it runs and however often it is moved or replayed. The token with the largest logit plus
noise is taken (Gumbel-max), because a choice between tokens then changes only when their own two sums all but meet:
rounding that differs with the batch moves a choice far more rarely than it would move the inverse of
a cumulative distribution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from tandem.model.device_io import stay
from tandem.types import SamplingParams

_NUCLEUS_GUESS = 256


def uniform(seed: int, position: int, size: int) -> torch.Tensor:
    """Noise of tokens `0 .. size - 1` at one output position, in (0, 1): odd multiples of 2**-24, fp32 `[size]`.

    The raw stream of Philox 4x64 (Salmon et al., SC 2011) under the key (seed, position); the first values do not
    depend on `size`.
    """
    key = np.array([seed & (2**64 - 1), position], dtype=np.uint64)
    raw = np.random.Philox(key=key).random_raw(size)
    return torch.from_numpy(((raw >> np.uint64(41)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23))


def _gumbel(seed: int, position: int, size: int) -> torch.Tensor:
    return uniform(seed, position, size).log_().neg_().log_().neg_()


def _most_likely(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of at least the `count` most likely tokens, most likely first, lowest id first among equals.

    A prefix of the same order over the whole vocabulary, whatever `count` is.
    """
    if count >= logits.numel():
        return torch.sort(logits, descending=True, stable=True).indices
    threshold = torch.topk(logits, count, sorted=False).values.min()
    ids = torch.nonzero(logits >= threshold).squeeze(1)
    return ids[torch.sort(logits[ids], descending=True, stable=True).indices]


def _nucleus(masses: torch.Tensor, target: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """The shortest prefix of `order` whose mass reaches `target`."""
    return order[: int(torch.searchsorted(masses[order].cumsum(0), target)) + 1]


def _candidates(scaled: torch.Tensor, params: SamplingParams) -> torch.Tensor | None:
    """Ids that top-k, top-p and min-p keep, in sampling order; None keeps the whole vocabulary in order of id."""
    kept = _top_candidates(scaled, params)
    if params.min_p <= 0.0:
        return kept
    ids = torch.arange(scaled.numel()) if kept is None else kept
    return ids[scaled[ids] >= scaled.max() + math.log(params.min_p)]


def _top_candidates(scaled: torch.Tensor, params: SamplingParams) -> torch.Tensor | None:
    size = scaled.numel()
    kept = None
    if 0 < params.top_k < size:
        kept = _most_likely(scaled, params.top_k)[: params.top_k]
    if params.top_p >= 1.0:
        return kept
    masses = (scaled - scaled.max()).exp()
    target = params.top_p * (masses if kept is None else masses[kept]).cumsum(0)[-1]
    if kept is None:
        kept = _most_likely(scaled, _NUCLEUS_GUESS)
        if masses[kept].cumsum(0)[-1] < target:
            kept = _most_likely(scaled, size)
    return _nucleus(masses, target, kept)


def sample(logits: torch.Tensor, params: SamplingParams, output_position: int) -> int:
    """One token from one row of logits `[vocab]` (fp32).

    Temperature 0 takes the most likely token, the lowest id among equals. Otherwise temperature, top-k, top-p and
    min-p apply in this order (top-p to the distribution that top-k left), and of what they keep the token is taken
    whose scaled logit plus Gumbel noise is largest.
    """
    if params.temperature == 0.0:
        return int(logits.argmax())
    scaled = logits.double() / params.temperature
    noise = _gumbel(params.seed, output_position, logits.numel())
    ids = _candidates(scaled, params)
    if ids is None:
        return int((scaled + noise).argmax())
    return int(ids[(scaled[ids] + noise[ids]).argmax()])


def largest(logits: torch.Tensor, get: Callable[[torch.Tensor], torch.Tensor] = stay) -> list[int]:
    """Of each row, the lowest id of the largest; on the host, numpy reads a row several times as fast as torch.

    `get` brings a tensor from the device to the host.
    """
    ids: list[int] = (logits.numpy().argmax(axis=-1) if logits.is_cpu else get(logits.argmax(dim=-1))).tolist()
    return ids


def sample_rows(logits: torch.Tensor, rows: Sequence[tuple[SamplingParams, int]]) -> list[int]:
    """One token for each row of logits `[num_rows, vocab]`, with that row's parameters and output position."""
    tokens = largest(logits)
    for row, (params, position) in enumerate(rows):
        if params.temperature != 0.0:
            tokens[row] = sample(logits[row], params, position)
    return tokens
