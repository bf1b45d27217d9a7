"""From the logits of an iteration to what each of its slices came to, whoever computed them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from tandem.model.choice import Choice
from tandem.model.executor import Executor, Scoring, SequenceSlice, SliceOutput
from tandem.model.logprobs import report
from tandem.model.sampling import choose
from tandem.model.stage import SCORED_ROWS
from tandem.types import BlockId, SamplingParams, TokenLogprobs

_WARM_UP_TOKENS = 32


def outputs_of(
    batch: Sequence[SequenceSlice], logits: Iterator[torch.Tensor], get: Callable[[torch.Tensor], torch.Tensor]
) -> list[SliceOutput]:
    """One entry for each slice. `logits` are those of `stage.row_groups`, in order; all of them are taken.

    `get` brings a tensor from the device that computes to the host.
    """
    tokens = iter(choose(next(logits), [piece.choices for piece in batch if piece.choices], get))
    outputs = [
        SliceOutput(
            tokens=next(tokens) if piece.choices else (),
            scores=_scores(piece.scoring, logits, get) if piece.scoring else (),
        )
        for piece in batch
    ]
    assert next(logits, None) is None
    return outputs


def _scores(
    scoring: Scoring, logits: Iterator[torch.Tensor], get: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[TokenLogprobs, ...]:
    scores: list[TokenLogprobs] = []
    for start in range(0, len(scoring.targets), SCORED_ROWS):
        targets = scoring.targets[start : start + SCORED_ROWS]
        scores += report(get(next(logits).log_softmax(-1)), targets, [scoring.num_top] * len(targets))
    return tuple(scores)


def warm_up(executor: Executor) -> None:
    """Runs a small prefill and a decode, so that the first request does not pay for it.

    Call before any block is in use: it writes to the first blocks of the cache.
    """
    layout = executor.cache.layout
    capacity = min(executor.cache.num_blocks * layout.block_size, executor.spec.max_context_tokens)
    num_tokens = min(_WARM_UP_TOKENS, capacity - 1)
    blocks = [BlockId(i) for i in range(layout.num_blocks_for(num_tokens + 1))]
    choices = [Choice(SamplingParams(max_tokens=2, temperature=1.0, top_p=0.9))]
    prompt = SequenceSlice(token_ids=[0] * num_tokens, num_computed=0, block_ids=blocks, choices=choices)
    token = SequenceSlice(token_ids=[0], num_computed=num_tokens, block_ids=blocks, choices=choices)
    executor.execute([prompt])
    executor.execute([token])
