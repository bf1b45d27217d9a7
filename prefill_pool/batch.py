"""From a chunk to what the executor computes for it."""

from __future__ import annotations

from collections.abc import Sequence

from prefill_pool.scheduler import Chunk
from tandem.model.choice import Choice
from tandem.model.executor import Scoring, SequenceSlice


def slice_of(chunk: Chunk, choices: Sequence[Choice]) -> SequenceSlice:
    """The chunk's tokens. `choices` are the request's: each has its first token sampled after the last chunk."""
    end = chunk.start + chunk.num_tokens
    return SequenceSlice(
        token_ids=chunk.request.prompt_token_ids[chunk.start : end],
        num_computed=chunk.start,
        block_ids=chunk.block_ids,
        choices=choices if chunk.is_last else (),
        scoring=_scoring(chunk, end),
    )


def _scoring(chunk: Chunk, end: int) -> Scoring | None:
    """Each token of the chunk says how likely the next one of the prompt is."""
    num_top = chunk.request.sampling.num_prompt_logprobs
    if num_top is None:
        return None
    return Scoring(targets=chunk.request.prompt_token_ids[chunk.start + 1 : end + 1], num_top=num_top)
