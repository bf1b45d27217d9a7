"""Attention with capped scores: the formula, and that cutting it into pieces changes nothing."""

from __future__ import annotations

import pytest
import torch

from tandem.model.attention import scores
from tandem.model.attention.base import AttentionOptions
from tandem.model.attention.scores import capped_attention

OPTIONS = AttentionOptions(scale=0.3, softcap=2.0)


def draw(num_tokens: int, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, keys, values and a causal mask: two sequences, three KV heads, groups of two, heads of eight."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 3, 2, num_tokens, 8, generator=generator)
    keys, values = (torch.randn(2, 3, length, 8, generator=generator) for _ in range(2))
    mask = torch.full((1, num_tokens, length), float("-inf")).triu(length - num_tokens + 1)
    return query, keys, values, mask


def test_it_is_the_formula() -> None:
    query, keys, values, mask = draw(5, 9)
    expected = torch.empty_like(query)
    for sequence, head, member, token in torch.cartesian_prod(*(torch.arange(n) for n in query.shape[:4])).tolist():
        raw = keys[sequence, head].double() @ query[sequence, head, member, token].double() * 0.3
        share = (2.0 * (raw / 2.0).tanh() + mask[0, token]).softmax(0)
        expected[sequence, head, member, token] = share @ values[sequence, head].double()
    torch.testing.assert_close(capped_attention(query, keys, values, mask, OPTIONS), expected)


@pytest.mark.parametrize("piece_bytes", [1, 1000, 3000])
def test_in_pieces_it_gives_the_same(monkeypatch: pytest.MonkeyPatch, piece_bytes: int) -> None:
    query, keys, values, mask = draw(7, 7)
    whole = capped_attention(query, keys, values, mask, OPTIONS)
    monkeypatch.setattr(scores, "_SCORES_BYTES", piece_bytes)
    torch.testing.assert_close(capped_attention(query, keys, values, mask, OPTIONS), whole)
