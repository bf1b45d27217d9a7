from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from tandem.model.decode_inputs import decode_inputs, ladder, rung, rung_for
from tandem.model.executor import Scoring, SequenceSlice
from tandem.types import BlockId

SPARE = 99


def piece(num_computed: int, blocks: Sequence[int], *, tokens: Sequence[int] = (7,)) -> SequenceSlice:
    return SequenceSlice(token_ids=tokens, num_computed=num_computed, block_ids=[BlockId(b) for b in blocks])


def test_a_ladder_is_dense_where_batches_are_small_and_ends_at_the_largest() -> None:
    assert ladder(1) == (1,)
    assert ladder(3) == (1, 2, 3)
    assert ladder(30) == (1, 2, 4, 8, 16, 24, 30)


def test_a_batch_goes_to_the_smallest_rung_that_holds_it() -> None:
    sizes = ladder(32)
    assert [rung(sizes, n) for n in (1, 3, 4, 5, 9, 32, 33)] == [1, 4, 4, 8, 16, 32, None]


def test_batches_that_are_too_large_or_not_of_single_tokens_are_not_replayed() -> None:
    sizes, token = ladder(2), piece(5, [1, 2])
    scored = SequenceSlice(
        token_ids=[1], num_computed=0, block_ids=[BlockId(0)], scoring=Scoring(targets=[2], num_top=0)
    )
    assert rung_for(sizes, [token]) == 1
    assert rung_for(sizes, [token] * 3) is None
    assert rung_for(sizes, [token, piece(0, [3], tokens=(1, 2))]) is None
    assert rung_for(sizes, [token, scored]) is None


def test_padded_rows_write_and_read_the_spare_block_alone() -> None:
    inputs = decode_inputs([piece(5, [8, 3])], 3, block_size=4, spare_block=SPARE)
    assert (inputs.token_ids, inputs.positions, inputs.blocks) == ((7, 0, 0), (5, 0, 0), (3, SPARE, SPARE))
    assert (inputs.table.offsets, inputs.table.blocks) == ((0, 2, 3, 4), (8, 3, SPARE, SPARE))
    assert inputs.table.last_fill == (2, 1, 1)


def test_a_batch_of_nobody_is_padding_alone() -> None:
    inputs = decode_inputs((), 2, block_size=4, spare_block=SPARE)
    assert (inputs.blocks, inputs.table.blocks, inputs.table.offsets) == ((SPARE,) * 2, (SPARE,) * 2, (0, 1, 2))


@given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=8),
    block_size=st.sampled_from([1, 4, 16]),
    largest=st.integers(8, 20),
)
def test_every_token_is_written_where_the_table_reads_it_last(
    lengths: list[int], block_size: int, largest: int
) -> None:
    batch = [piece(length, range(100 * row, 100 * row + 80)) for row, length in enumerate(lengths)]
    size = rung_for(ladder(largest), batch)
    assert size is not None
    inputs = decode_inputs(batch, size, block_size=block_size, spare_block=SPARE)
    assert len(inputs.token_ids) == len(inputs.positions) == len(inputs.blocks) == len(inputs.table.last_fill) == size
    for row in range(size):
        blocks = inputs.table.blocks[inputs.table.offsets[row] : inputs.table.offsets[row + 1]]
        assert blocks[-1] == inputs.blocks[row]
        assert (len(blocks) - 1) * block_size + inputs.table.last_fill[row] == inputs.positions[row] + 1
