"""A batch's block tables in the form of FlashInfer's kernels: offsets, all blocks, last blocks' fill. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, kw_only=True, slots=True)
class PageTable:
    """Slice `i` has query tokens `q_offsets[i] : q_offsets[i + 1]` and blocks `blocks[offsets[i] : offsets[i + 1]]`."""

    q_offsets: tuple[int, ...]
    offsets: tuple[int, ...]
    blocks: tuple[int, ...]
    last_fill: tuple[int, ...]
    """Tokens in each slice's last block, 1 to the block size."""

    @property
    def is_decode(self) -> bool:
        """Whether every slice is one token."""
        return self.q_offsets == tuple(range(len(self.q_offsets)))


def page_table(slices: Sequence[tuple[int, int, Sequence[int]]], block_size: int) -> PageTable:
    """From (tokens, context length, block ids) of each slice; ids past the context are left out."""
    counts = [-(-length // block_size) for _, length, _ in slices]
    return PageTable(
        q_offsets=(0, *accumulate(tokens for tokens, _, _ in slices)),
        offsets=(0, *accumulate(counts)),
        blocks=tuple(block for (_, _, ids), count in zip(slices, counts, strict=True) for block in ids[:count]),
        last_fill=tuple((length - 1) % block_size + 1 for _, length, _ in slices),
    )


def padded_decode(table: PageTable, size: int, *, spare_block: int) -> PageTable:
    """A decode table of exactly `size` slices; those added read one token of `spare_block`, which nobody else uses."""
    assert table.is_decode
    missing = size - len(table.last_fill)
    assert missing >= 0
    end = table.offsets[-1]
    return PageTable(
        q_offsets=tuple(range(size + 1)),
        offsets=(*table.offsets, *(end + i + 1 for i in range(missing))),
        blocks=(*table.blocks, *[spare_block] * missing),
        last_fill=(*table.last_fill, *[1] * missing),
    )
