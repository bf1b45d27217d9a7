"""From a chunk to what the executor computes for it, and from scores to what the router is told."""

from __future__ import annotations

from collections.abc import Sequence

from prefill_pool.scheduler import Chunk
from tandem.model.choice import Choice
from tandem.model.executor import Scoring, SequenceSlice
from tandem.rpc.convert import logprobs_to_proto
from tandem.rpc.tandem.v1 import worker_pb2
from tandem.types import TokenLogprobs


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


def scores_event(scores: Sequence[TokenLogprobs]) -> worker_pb2.PrefillEvent:
    """A chunk's share of the prompt's log-probabilities."""
    message = worker_pb2.PromptLogprobs(tokens=[logprobs_to_proto(entry) for entry in scores])
    return worker_pb2.PrefillEvent(prompt_logprobs=message)
