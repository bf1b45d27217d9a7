"""Log-probabilities to report: of the tokens that were taken, and of the most likely ones beside them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandem.types import TokenLogprobs


def report(logprobs: torch.Tensor, taken: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """One entry for each row of `[num_rows, vocab]`: the `num_top[i]` most likely tokens, and the one taken."""
    of_taken = logprobs.gather(1, torch.tensor(taken).unsqueeze(1)).squeeze(1).tolist()
    most = max(num_top)
    if not most:
        return [TokenLogprobs(logprob=value) for value in of_taken]
    top = torch.topk(logprobs, min(most, logprobs.shape[1]), dim=1)
    ids, values = top.indices.tolist(), top.values.tolist()
    return [
        TokenLogprobs(logprob=value, top_ids=tuple(ids[row][:count]), top_logprobs=tuple(values[row][:count]))
        for row, (value, count) in enumerate(zip(of_taken, num_top, strict=True))
    ]
