"""Chooses tokens from logits. A choice depends on (logits, parameters, output position) alone, never on the batch.

The noise of output position i is a counter-based function of (seed, i), so a request gives the same tokens on
whatever worker it runs and however often it is moved or replayed.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import torch

from tandem.types import SamplingParams

_NUCLEUS_GUESS = 256


def uniform(seed: int, position: int) -> float:
    """The noise of one output position: uniform in [0, 1), a multiple of 2**-53."""
    message = struct.pack("<QQ", seed & (2**64 - 1), position)
    digest = hashlib.blake2b(message, digest_size=8, person=b"tandem-sample").digest()
    return float((int.from_bytes(digest, "little") >> 11) * 2.0**-53)


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
    """Ids that top-k and top-p keep, in sampling order; None keeps the whole vocabulary in order of id."""
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

    Temperature 0 takes the most likely token, the lowest id among equals. Otherwise temperature, top-k and top-p
    apply in this order (top-p to the distribution that top-k left), and the inverse of the cumulative distribution
    is taken in float64 at `uniform(seed, output_position)`.
    """
    if params.temperature == 0.0:
        return int(logits.argmax())
    scaled = logits.double() / params.temperature
    ids = _candidates(scaled, params)
    kept = scaled if ids is None else scaled[ids]
    cumulative = (kept - kept.max()).exp().cumsum(0)
    total = cumulative[-1:]
    last = int(torch.searchsorted(cumulative, total))
    chosen = int(torch.searchsorted(cumulative, total * uniform(params.seed, output_position), right=True))
    index = min(chosen, last)
    return index if ids is None else int(ids[index])


def sample_rows(logits: torch.Tensor, rows: Sequence[tuple[SamplingParams, int]]) -> list[int]:
    """One token for each row of logits `[num_rows, vocab]`, with that row's parameters and output position."""
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    for row, (params, position) in enumerate(rows):
        if params.temperature != 0.0:
            tokens[row] = sample(logits[row], params, position)
    return tokens
