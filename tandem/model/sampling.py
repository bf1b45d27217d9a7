"""From a batch's logits to its tokens: log-probabilities as the model has them, then shaping, then the choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tandem.model.choice import Choice
from tandem.model.device_io import stay
from tandem.model.logits import shape_logits
from tandem.model.logprobs import report
from tandem.model.sampler import largest, sample_rows
from tandem.types import SampledToken, TokenLogprobs


def _takes_most_likely(choice: Choice) -> bool:
    sampling = choice.sampling
    return choice.is_plain and sampling.temperature == 0.0 and sampling.num_logprobs is None


def choose(
    logits: torch.Tensor, groups: Sequence[Sequence[Choice]], get: Callable[[torch.Tensor], torch.Tensor] = stay
) -> list[tuple[SampledToken, ...]]:
    """A token for each choice. Row `i` of logits `[num_groups, vocab]` (fp32, overwritten) is that of `groups[i]`.

    `get` brings a tensor to the host: token ids where all choices take the most likely token, else all rows.
    """
    choices = [choice for group in groups for choice in group]
    if not choices:
        return []
    if all(map(_takes_most_likely, choices)):
        best = largest(logits, get)
        return [(SampledToken(token_id=token_id),) * len(group) for group, token_id in zip(groups, best, strict=True)]
    logits = get(logits)
    if len(choices) > len(groups):
        logits = logits.repeat_interleave(torch.tensor([len(group) for group in groups]), dim=0)
    wanted = {row: c.sampling.num_logprobs for row, c in enumerate(choices) if c.sampling.num_logprobs is not None}
    original = logits[list(wanted)].log_softmax(-1) if wanted else None
    shape_logits(logits, choices)
    ids = sample_rows(logits, [(choice.sampling, choice.position) for choice in choices])
    reported: dict[int, TokenLogprobs] = {}
    if original is not None:
        entries = report(original, [ids[row] for row in wanted], list(wanted.values()))
        reported = dict(zip(wanted, entries, strict=True))
    tokens = iter([SampledToken(token_id=ids[row], logprobs=reported.get(row)) for row in range(len(choices))])
    return [tuple(next(tokens) for _ in group) for group in groups]
