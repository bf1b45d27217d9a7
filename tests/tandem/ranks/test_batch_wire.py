"""Batches as packed numbers: what another rank needs of them comes back, and nothing but a batch is taken for one."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tandem.errors import TransportError
from tandem.model.executor import Scoring, SequenceSlice
from tandem.ranks.batch_wire import SOMEONE, pack_batch, pack_copies, unpack_batch, unpack_copies
from tandem.types import BlockId

BLOCK_SIZE = 8


@st.composite
def slices(draw: st.DrawFn) -> SequenceSlice:
    tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20))
    num_computed = draw(st.integers(0, 40))
    num_blocks = -(-(num_computed + len(tokens)) // BLOCK_SIZE) + draw(st.integers(0, 3))
    count = draw(st.integers(0, len(tokens)))
    return SequenceSlice(
        token_ids=tokens,
        num_computed=num_computed,
        block_ids=draw(st.lists(st.integers(0, 10**6).map(BlockId), min_size=num_blocks, max_size=num_blocks)),
        choices=SOMEONE * draw(st.integers(0, 3)),
        scoring=Scoring(targets=[1] * count, num_top=2) if count else None,
    )


def num_scored(piece: SequenceSlice) -> int:
    return len(piece.scoring.targets) if piece.scoring else 0


@given(st.lists(slices(), max_size=6))
def test_a_batch_comes_back_as_far_as_computing_needs_it(batch: list[SequenceSlice]) -> None:
    found = unpack_batch(pack_batch(batch, BLOCK_SIZE))
    assert len(found) == len(batch)
    for ours, theirs in zip(batch, found, strict=True):
        needed = -(-(ours.num_computed + len(ours.token_ids)) // BLOCK_SIZE)
        assert list(theirs.token_ids) == list(ours.token_ids)
        assert list(theirs.block_ids) == list(ours.block_ids[:needed])
        assert theirs.num_computed == ours.num_computed
        assert bool(theirs.choices) == bool(ours.choices)
        assert num_scored(theirs) == num_scored(ours)


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), max_size=5))
def test_copies_come_back(pairs: list[tuple[int, int]]) -> None:
    sources, destinations = [BlockId(s) for s, _ in pairs], [BlockId(d) for _, d in pairs]
    assert unpack_copies(pack_copies(sources, destinations)) == (sources, destinations)


@pytest.mark.parametrize(("cut", "added"), [(4, 0), (0, 4), (1, 0), (28, 0), (1000, 0)])
def test_what_is_too_short_or_too_long_is_no_batch(cut: int, added: int) -> None:
    piece = SequenceSlice(token_ids=[1, 2], num_computed=0, block_ids=[BlockId(5)])
    data = pack_batch([piece], BLOCK_SIZE)
    with pytest.raises(TransportError):
        unpack_batch(data[: max(0, len(data) - cut)] + bytes(added))
