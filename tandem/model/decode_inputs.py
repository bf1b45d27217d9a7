"""What a captured decode iteration is told: tokens, where they stand and are written, and tables, padded. Pure.

Owns whether a batch may be replayed at all and what it is padded with. Sampling is outside of the graph, so rows with
grammars, penalties or log-probabilities are rows like others.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.model.attention.page_table import PageTable, padded_decode, page_table

LARGEST = 256
"""Batches beyond this are computed eagerly: their kernels take longer than their launches."""


class Piece(Protocol):
    """As much of `SequenceSlice` as is read here."""

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def num_computed(self) -> int: ...
    @property
    def block_ids(self) -> Sequence[int]: ...
    @property
    def scoring(self) -> object | None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeInputs:
    """Of `size` rows, the first of which are the batch's. Each row is one token."""

    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    blocks: tuple[int, ...]
    """Into which each row's K and V go."""
    table: PageTable


def ladder(largest: int) -> tuple[int, ...]:
    """Sizes to capture: 1, 2, 4, then multiples of 8, up to and with `largest`; padding stays below 8 rows."""
    return tuple(sorted({size for size in (1, 2, 4, *range(8, largest, 8)) if size < largest} | {largest}))


def rung(sizes: Sequence[int], num_sequences: int) -> int | None:
    """The smallest of the ascending `sizes` that holds `num_sequences`; None when none does."""
    index = bisect_left(sizes, num_sequences)
    return sizes[index] if index < len(sizes) else None


def rung_for(sizes: Sequence[int], batch: Sequence[Piece]) -> int | None:
    """The size to replay a batch at; None for one that is too large, or has a chunk, or prompt tokens to be scored."""
    is_decode = all(len(piece.token_ids) == 1 and piece.scoring is None for piece in batch)
    return rung(sizes, len(batch)) if is_decode else None


def decode_inputs(batch: Sequence[Piece], size: int, *, block_size: int, spare_block: int) -> DecodeInputs:
    """Rows of single tokens, padded to `size` with rows that write and read one token of `spare_block`."""
    missing = size - len(batch)
    lengths = [(1, piece.num_computed + 1, piece.block_ids) for piece in batch]
    return DecodeInputs(
        token_ids=(*(piece.token_ids[0] for piece in batch), *[0] * missing),
        positions=(*(piece.num_computed for piece in batch), *[0] * missing),
        blocks=(*(piece.block_ids[piece.num_computed // block_size] for piece in batch), *[spare_block] * missing),
        table=padded_decode(page_table(lengths, block_size), size, spare_block=spare_block),
    )
