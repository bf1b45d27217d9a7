"""A batch as plain packed numbers: what rank 0 tells the other ranks to run.

Only what computing needs: tokens, positions and block tables; whether the token after a slice is sampled, and how many
of its tokens are scored. Sampling itself is rank 0's. Layout, little-endian: the number of slices; five numbers for
each (tokens, computed tokens, blocks, if it is sampled, scored tokens); all token ids; all block ids; 4 bytes each.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tandem.errors import TransportError
from tandem.model.choice import Choice
from tandem.model.executor import Scoring, SequenceSlice
from tandem.types import BlockId, SamplingParams

_Numbers = npt.NDArray[np.int32]
_DTYPE = np.dtype("<i4")
_FIELDS = 5

SOMEONE = (Choice(SamplingParams(max_tokens=1)),)
"""Stands for whatever choices rank 0 samples for."""


def pack_batch(batch: Sequence[SequenceSlice], block_size: int) -> bytes:
    """Block tables are cut to what the slices read and write."""
    counts = [
        (
            len(piece.token_ids),
            piece.num_computed,
            -(-(piece.num_computed + len(piece.token_ids)) // block_size),
            bool(piece.choices),
            len(piece.scoring.targets) if piece.scoring else 0,
        )
        for piece in batch
    ]
    blocks = [piece.block_ids[: count[2]] for piece, count in zip(batch, counts, strict=True)]
    arrays = [
        np.array([len(batch)], dtype=_DTYPE),
        np.array(counts, dtype=_DTYPE).reshape(-1),
        *(np.array(piece.token_ids, dtype=_DTYPE) for piece in batch),
        *(np.array(table, dtype=_DTYPE) for table in blocks),
    ]
    return np.concatenate(arrays).tobytes()


def unpack_batch(data: bytes) -> list[SequenceSlice]:
    """Inverse of `pack_batch`, as far as it goes. Raises TransportError for anything else."""
    if not data or len(data) % _DTYPE.itemsize:
        raise TransportError(f"not a packed batch: {len(data)} bytes")
    numbers: _Numbers = np.frombuffer(data, dtype=_DTYPE)
    num_slices = int(numbers[0])
    if not 0 <= num_slices <= len(numbers) // _FIELDS:
        raise TransportError(f"not a packed batch: {num_slices} slices in {len(data)} bytes")
    counts = numbers[1 : 1 + _FIELDS * num_slices].reshape(-1, _FIELDS)
    totals = counts.sum(axis=0, dtype=np.int64)
    if len(numbers) != 1 + _FIELDS * num_slices + totals[0] + totals[2]:
        raise TransportError("not a packed batch")
    token = 1 + _FIELDS * num_slices
    block = token + int(totals[0])
    batch = []
    for num_tokens, num_computed, num_blocks, is_sampled, num_scored in counts.tolist():
        batch.append(
            SequenceSlice(
                token_ids=numbers[token : token + num_tokens].tolist(),
                num_computed=num_computed,
                block_ids=[BlockId(b) for b in numbers[block : block + num_blocks].tolist()],
                choices=SOMEONE if is_sampled else (),
                scoring=Scoring(targets=range(num_scored), num_top=0) if num_scored else None,
            )
        )
        token, block = token + num_tokens, block + num_blocks
    return batch


def pack_copies(sources: Sequence[BlockId], destinations: Sequence[BlockId]) -> bytes:
    """Block copies: all sources, then all destinations."""
    return np.array([*sources, *destinations], dtype=_DTYPE).tobytes()


def unpack_copies(data: bytes) -> tuple[list[BlockId], list[BlockId]]:
    """Inverse of `pack_copies`."""
    numbers = [BlockId(b) for b in np.frombuffer(data, dtype=_DTYPE).tolist()]
    half = len(numbers) // 2
    return numbers[:half], numbers[half:]


def pack_count(count: int) -> bytes:
    """One number."""
    return np.array([count], dtype=_DTYPE).tobytes()


def unpack_count(data: bytes) -> int:
    """Inverse of `pack_count`."""
    return int(np.frombuffer(data, dtype=_DTYPE)[0])
