"""Attention with capped scores, which torch's fused kernel has not; in pieces whose scores fit into little memory."""

from __future__ import annotations

import torch

from tandem.model.attention.base import AttentionOptions

_SCORES_BYTES = 32 << 20


def capped_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    """Softmax over c tanh(scale q k / c) + mask, in fp32, times the values (Gemma 2, arXiv:2408.00118, section 2).

    `query` `[n, num_kv_heads, group, num_tokens, head_dim]`, `keys` and `values` `[n, num_kv_heads, length, head_dim]`,
    `mask` `[n or 1, num_tokens, length]`; the result is shaped like `query`.
    """
    row_bytes = 4 * query.shape[0] * query.shape[1] * query.shape[2] * keys.shape[2]
    size = max(1, _SCORES_BYTES // row_bytes)
    parts = zip(torch.split(query, size, dim=3), torch.split(mask, size, dim=1), strict=True)
    return torch.cat([_attend(part, keys, values, rows, options) for part, rows in parts], dim=3)


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    cap = options.softcap
    assert cap is not None
    folded = query.flatten(2, 3)  # a group's heads and tokens as rows, so that keys are not copied for each head
    scores = (folded @ keys.transpose(2, 3)).float().mul_(options.scale / cap).tanh_().mul_(cap)
    shaped = scores.view(*query.shape[:4], keys.shape[2]).add_(mask[:, None, None])
    return (shaped.softmax(-1).to(values.dtype).flatten(2, 3) @ values).view(query.shape)
