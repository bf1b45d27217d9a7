"""Cuts an iteration's batch into parts that go through the pipeline's stages one behind the other."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.model.executor import SequenceSlice

MIN_TOKENS = 16
"""Fewer tokens than this are not worth a pass of their own."""


def micro_batches(batch: Sequence[SequenceSlice], num_parts: int) -> list[list[SequenceSlice]]:
    """A batch cut into up to `num_parts` parts of about as many tokens, in order, so that stages work side by side.

    A slice may be cut in two: KV that a part reads was written by the parts before it. Only the end of a slice keeps
    its choices; scores are left out, for they are made of the whole batch.
    """
    num_tokens = sum(len(piece.token_ids) for piece in batch)
    num_parts = max(1, min(num_parts, num_tokens // MIN_TOKENS))
    ends = [num_tokens * (part + 1) // num_parts for part in range(num_parts)]
    parts: list[list[SequenceSlice]] = [[]]
    done = 0
    for piece in batch:
        start = 0
        while start < len(piece.token_ids):
            if done == ends[len(parts) - 1]:
                parts.append([])
            count = min(len(piece.token_ids) - start, ends[len(parts) - 1] - done)
            parts[-1].append(_part_of(piece, start, count))
            start, done = start + count, done + count
    return parts


def _part_of(piece: SequenceSlice, start: int, count: int) -> SequenceSlice:
    is_end = start + count == len(piece.token_ids)
    return SequenceSlice(
        token_ids=piece.token_ids[start : start + count],
        num_computed=piece.num_computed + start,
        block_ids=piece.block_ids,
        choices=piece.choices if is_end else (),
    )
