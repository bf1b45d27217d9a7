"""What a plan's steps are to the executor."""

from __future__ import annotations

from decode_pool.plan import DecodeStep
from tandem.model.choice import Choice
from tandem.model.executor import SequenceSlice
from tandem.types import SampledToken

NO_TOKEN = SampledToken(token_id=0)
"""Of a step that nobody waits for."""


def slice_of(step: DecodeStep, choice: Choice | None) -> SequenceSlice:
    """One token of a sequence; without a choice nothing is sampled after it."""
    return SequenceSlice(
        token_ids=(step.token_id,),
        num_computed=step.num_computed,
        block_ids=step.block_ids,
        choices=() if choice is None else (choice,),
    )
