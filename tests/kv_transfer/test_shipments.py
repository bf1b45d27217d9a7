"""Which messages an iteration posts: as many layers in each as its link and its compute make best."""

from __future__ import annotations

from typing import cast

import pytest

from kv_transfer.handoff import BlockRange
from kv_transfer.sender import OutgoingHandoff
from kv_transfer.shipments import Shipments
from kv_transfer.sizing import Chunk, LinkSpeed
from tandem.types import BlockId

LAYERS = range(6)
QUICK = LinkSpeed(bytes_per_s=10e9, latency_s=1e-5)
SLOW = LinkSpeed(bytes_per_s=1e6, latency_s=1e-5)


class NotesPosts:
    """A handoff that only notes what it is given to post, on a link of a speed."""

    def __init__(self, speed: LinkSpeed | None, first_block: int = 0) -> None:
        self.speed = speed
        self.first_block = first_block
        self.posted: list[BlockRange] = []

    def ship(self, blocks: BlockRange, block_ids: tuple[BlockId, ...], *, layers_per_message: int) -> None:
        pass

    def post(self, blocks: BlockRange, block_ids: tuple[BlockId, ...]) -> None:
        self.posted.append(blocks)


def layers_of_messages(handoff: NotesPosts, *, layer_s: float = 1e-3, fixed: int = 0) -> list[int]:
    """Of ten blocks of 1 kB a layer."""
    shipments = Shipments(layers=LAYERS, layers_per_message=fixed)
    chunk = Chunk(num_layers=len(LAYERS), layer_bytes=10_000, layer_s=layer_s)
    block_ids = tuple(map(BlockId, range(10)))
    shipments.add(cast(OutgoingHandoff, handoff), chunk, first_block=0, num_blocks=10, block_ids=block_ids)
    for layer in LAYERS:
        shipments.written(layer)
        assert all(blocks.layers.stop - 1 <= layer for blocks in handoff.posted), "posted before it was written"
    return [blocks.num_layers for blocks in handoff.posted]


def test_what_a_link_moves_in_no_time_goes_in_one_message() -> None:
    assert layers_of_messages(NotesPosts(QUICK)) == [6]


def test_on_a_slow_link_each_layer_leaves_when_it_is_written() -> None:
    assert layers_of_messages(NotesPosts(SLOW), layer_s=11e-3) == [1] * 6


def test_what_the_destination_holds_does_not_make_messages_smaller() -> None:
    assert layers_of_messages(NotesPosts(SLOW, first_block=10), layer_s=11e-3) == [6]


@pytest.mark.parametrize(("speed", "layer_s"), [(None, 1e-3), (QUICK, 0.0)])
def test_until_both_speeds_are_known_each_layer_is_a_message(speed: LinkSpeed | None, layer_s: float) -> None:
    assert layers_of_messages(NotesPosts(speed), layer_s=layer_s) == [1] * 6


def test_a_number_in_the_configuration_counts_for_all_links() -> None:
    assert layers_of_messages(NotesPosts(QUICK), fixed=4) == [3, 3]
