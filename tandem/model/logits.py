"""What requests do to the model's logits before a token is chosen: penalties, bias, stop tokens held off, grammar.

In this order, each in one pass over all rows that ask for it; rows that ask for nothing are not touched.
The repetition penalty is transformers' (and Keskar et al.'s, arXiv:1909.05858), presence and frequency are OpenAI's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tandem.model.choice import Choice
from tandem.model.grammar import TokenMatcher
from tandem.model.history import TokenHistory

Rows = list[tuple[int, Choice]]


def shape_logits(logits: torch.Tensor, choices: Sequence[Choice]) -> None:
    """Changes logits `[num_rows, vocab]` (fp32) in place; `choices` has one entry for each row."""
    shaped = [(row, choice) for row, choice in enumerate(choices) if not choice.is_plain]
    if not shaped:
        return
    _penalise(logits, [(row, c, c.history) for row, c in shaped if c.history is not None])
    _add_bias(logits, [(row, c) for row, c in shaped if len(c.biases)])
    _hold_off_stops(logits, [(row, c) for row, c in shaped if c.must_go_on])
    matched = [(row, c.matcher) for row, c in shaped if c.matcher is not None]
    if matched:
        _mask(logits, matched)


def _penalise(logits: torch.Tensor, rows: list[tuple[int, Choice, TokenHistory]]) -> None:
    if not rows:
        return
    lengths = [len(history.ids) for _, _, history in rows]

    def spread(values: Sequence[float]) -> torch.Tensor:
        return torch.from_numpy(np.repeat(np.asarray(values, dtype=np.float32), lengths))

    at = (
        torch.from_numpy(np.repeat(np.asarray([row for row, _, _ in rows], dtype=np.int64), lengths)),
        torch.from_numpy(np.concatenate([history.ids for _, _, history in rows])),
    )
    counts = torch.from_numpy(np.concatenate([history.counts for _, _, history in rows]))
    repetition = spread([c.sampling.repetition_penalty for _, c, _ in rows])
    values = logits[at]
    values = torch.where(values < 0, values * repetition, values / repetition)
    values -= spread([c.sampling.frequency_penalty for _, c, _ in rows]) * counts
    values -= spread([c.sampling.presence_penalty for _, c, _ in rows]) * (counts > 0)
    logits[at] = values


def _add_bias(logits: torch.Tensor, rows: Rows) -> None:
    if rows:
        at = (_rows_of(rows, [len(c.biases) for _, c in rows]), torch.cat([c.bias_ids for _, c in rows]))
        logits.index_put_(at, torch.cat([c.biases for _, c in rows]), accumulate=True)


def _hold_off_stops(logits: torch.Tensor, rows: Rows) -> None:
    if rows:
        stops = [c.sampling.stop_token_ids for _, c in rows]
        ids = torch.tensor([token_id for each in stops for token_id in each])
        logits[_rows_of(rows, [len(each) for each in stops]), ids] = float("-inf")


def _mask(logits: torch.Tensor, rows: list[tuple[int, TokenMatcher]]) -> None:
    """Tokens that a row's grammar does not allow become impossible."""
    vocab_size = logits.shape[-1]
    words = torch.empty(len(rows), -(-vocab_size // 32), dtype=torch.int32)
    for index, (_, matcher) in enumerate(rows):
        matcher.fill(words, index)
    banned = np.unpackbits(~words.numpy().view(np.uint8), axis=1, count=vocab_size, bitorder="little").view(np.bool_)
    for (row, _), mask in zip(rows, torch.from_numpy(banned), strict=True):
        logits[row].masked_fill_(mask, float("-inf"))  # in place: a copy of the rows costs more than all the rest


def _rows_of(rows: Rows, lengths: list[int]) -> torch.Tensor:
    return torch.repeat_interleave(torch.tensor([row for row, _ in rows]), torch.tensor(lengths))
