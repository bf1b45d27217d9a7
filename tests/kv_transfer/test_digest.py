"""A payload's digest is the same however it is cut and copied, and another one for any damage a transfer may do."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
import torch

from kv_transfer import segments
from kv_transfer.digest import digest
from kv_transfer.segments import Bytes, as_bytes, copy, digest_bytes
from tandem.model import native
from tests.kv_transfer.peers import cut

BLOCK_BYTES = 24_576
"""One layer of a block of the default model."""
NUM_BLOCKS = 12
ROW_BYTES = 128
"""One head of one token in bf16."""


@pytest.fixture(params=["in one pass", "in two passes"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With our own kernel, and as it is done where that was not built."""
    if request.param == "in one pass":
        assert native.kernels() is not None
    else:
        monkeypatch.setattr(segments, "kernels", lambda: None)



def payload(num_bytes: int = NUM_BLOCKS * BLOCK_BYTES, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def views(pieces: Sequence[torch.Tensor]) -> list[Bytes]:
    return as_bytes(pieces, sum(piece.numel() for piece in pieces))


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("num_bytes", [1, 240, 241, 65_535, 65_536, 200_001, 3_000_000])
@pytest.mark.parametrize("pieces", [(None, None), (1000, None), (None, 24_576), (5000, 777)])
def test_a_copy_has_the_digest_of_its_source_however_both_are_cut(
    num_bytes: int, pieces: tuple[int | None, int | None]
) -> None:
    source, target = cut(payload(num_bytes), pieces[0]), cut(torch.zeros(num_bytes, dtype=torch.uint8), pieces[1])
    expected = digest(source)
    assert copy(views(target), views(source), with_digest=True) == expected
    assert torch.equal(torch.cat(target), torch.cat(source))
    assert digest_bytes(views(target)) == expected


@pytest.mark.usefixtures("_way")
def test_a_copy_without_a_digest_copies_all_the_same() -> None:
    source, target = payload(), torch.zeros(NUM_BLOCKS * BLOCK_BYTES, dtype=torch.uint8)
    assert copy(views(cut(target, 5000)), views(cut(source, 5000)), with_digest=False) == 0
    assert torch.equal(target, source)


def received(sent: torch.Tensor) -> int:
    """What a receiver finds."""
    return copy(views([torch.empty_like(sent)]), views([sent]), with_digest=True)


@pytest.mark.usefixtures("_way")
def test_every_flipped_bit_is_found() -> None:
    sent, drawn = payload(), random.Random(1)
    expected = received(sent)
    ends = [*range(64), *range(sent.numel() - 64, sent.numel())]
    for place in ends + drawn.sample(range(sent.numel()), 400):
        bit = 1 << drawn.randrange(8)
        sent[place] ^= bit
        assert received(sent) != expected, place
        sent[place] ^= bit
    assert received(sent) == expected


@pytest.mark.usefixtures("_way")
def test_every_two_blocks_that_changed_places_are_found() -> None:
    sent = payload()
    expected = received(sent)
    for one in range(NUM_BLOCKS):
        for other in range(one):
            blocks = list(sent.split(BLOCK_BYTES))
            blocks[one], blocks[other] = blocks[other], blocks[one]
            assert received(torch.cat(blocks)) != expected, (one, other)


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("num_bytes", [1, 2, 4, 64, ROW_BYTES, 1024, BLOCK_BYTES])
def test_rows_that_came_shifted_are_found(num_bytes: int) -> None:
    sent = payload()
    assert received(sent.roll(num_bytes)) != received(sent)


@pytest.mark.usefixtures("_way")
def test_zeros_where_bytes_should_be_are_found() -> None:
    sent = payload()
    expected = received(sent)
    for block in range(NUM_BLOCKS):
        torn = sent.clone()
        torn[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] = 0
        assert received(torn) != expected


@pytest.mark.usefixtures("_way")
def test_zeros_of_another_number_are_something_else() -> None:
    assert received(torch.zeros(70_000, dtype=torch.uint8)) != received(torch.zeros(70_001, dtype=torch.uint8))
