"""The machines of rank 0: what it waits for of the other ranks, and which messages it takes from which rank."""

from __future__ import annotations

import pytest

from kv_transfer.destination import DestinationHandoff
from kv_transfer.handoff import (
    BlockRange,
    Deliver,
    Failed,
    HandoffState,
    LaneDigest,
    Record,
    ReleaseBlocks,
    SendDelivered,
    SendDrained,
    StopReceiving,
    combined_digest,
)
from kv_transfer.plan import Lane
from kv_transfer.source import SourceHandoff
from tandem.types import Epoch

EPOCH = Epoch(3)
LANES = [
    Lane(source_rank=source, destination_rank=0, layers=range(2), heads=range(source, source + 1))
    for source in (0, 1)
]
"""Two source ranks with a head each, into one that has both."""


def part(source: int, *, layer: int = 0, num_layers: int = 2, destination: int = 0) -> BlockRange:
    return BlockRange(
        layer=layer, num_layers=num_layers, first_block=0, num_blocks=2, source=source, destination=destination
    )


def record(*digests: int) -> Record:
    """`digests`: of each lane's one message."""
    own, *others = [combined_digest([digest]) for digest in digests]
    lanes = tuple(LaneDigest(source=i, destination=0, digest=digest) for i, digest in enumerate(others, start=1))
    return Record(first=(), num_cached_tokens=0, num_messages=len(digests), digest=own, other_lanes=lanes)


def make_destination(*other_ranks: int) -> DestinationHandoff:
    destination = DestinationHandoff(epoch=EPOCH, lanes=LANES, num_blocks=2, lease_s=10.0, now=0.0)
    destination.reserved(other_ranks=other_ranks)
    return destination


def arrive(destination: DestinationHandoff) -> list[object]:
    """Both lanes' messages and the record."""
    for source in (0, 1):
        assert destination.may_place(part(source), EPOCH)
        destination.landed(part(source), digest=source + 5, error=None)
    return list(destination.record(record(5, 6)))


def test_it_is_whole_when_every_lane_is() -> None:
    destination = make_destination()
    assert destination.may_place(part(0), EPOCH)
    assert destination.landed(part(0), digest=5, error=None) == []
    assert destination.record(record(5, 6)) == []
    assert destination.missing() == [part(1)]
    assert destination.may_place(part(1), EPOCH)
    assert destination.landed(part(1), digest=6, error=None) == [SendDelivered(), Deliver(record=record(5, 6))]


def test_the_same_blocks_of_two_lanes_are_not_the_same_message() -> None:
    destination = make_destination()
    assert destination.may_place(part(0), EPOCH)
    assert destination.may_place(part(1), EPOCH)
    assert not destination.may_place(part(1), EPOCH)


@pytest.mark.parametrize(
    "blocks", [part(2), part(0, destination=1), part(0, layer=1, num_layers=2)], ids=["lane", "rank", "layers"]
)
def test_what_is_of_no_lane_here_is_refused(blocks: BlockRange) -> None:
    assert not make_destination().may_place(blocks, EPOCH)


@pytest.mark.parametrize("told", [record(5), record(5, 7), record(6, 5)], ids=["missing", "wrong", "exchanged"])
def test_each_lane_has_a_digest_of_its_own_to_match(told: Record) -> None:
    destination = make_destination()
    for source in (0, 1):
        destination.may_place(part(source), EPOCH)
        destination.landed(part(source), digest=source + 5, error=None)
    assert Failed(reason="the digest of what arrived is not that of what was sent") in destination.record(told)


def test_it_is_delivered_only_when_the_other_ranks_have_everything_too() -> None:
    destination = make_destination(1, 2)
    assert arrive(destination) == []
    assert destination.rank_ended(2, whole=True) == []
    assert destination.rank_ended(1, whole=True) == [SendDelivered(), Deliver(record=record(5, 6))]
    destination.check_invariants()


def test_a_rank_that_ends_without_everything_fails_the_handoff_for_all() -> None:
    destination = make_destination(1, 2)
    arrive(destination)
    actions = destination.rank_ended(1, whole=False)
    assert Failed(reason="rank 1 has not received its part") in actions
    assert StopReceiving() in actions


def test_blocks_come_back_only_when_no_rank_is_written_into_any_more() -> None:
    destination = make_destination(1, 2)
    destination.abort("client gone")
    assert destination.receives_stopped() == []
    assert destination.peer_drained() == []
    assert destination.rank_ended(1, whole=True) == []
    assert destination.rank_ended(2, whole=False) == [ReleaseBlocks()]
    assert destination.state is HandoffState.DRAINED
    destination.check_invariants()


def make_source() -> SourceHandoff:
    source = SourceHandoff(lease_s=10.0, max_resends=1, now=0.0)
    source.ticket(epoch=EPOCH, lease_s=10.0, first_block=0, now=0.0, other_ranks=(1,))
    return source


def test_source_blocks_come_back_only_when_no_rank_sends_any_more() -> None:
    source = make_source()
    assert source.posting(part(0))
    source.sent(part(0), None)
    assert source.delivered(1.0) == []
    assert source.rank_ended(1) == [ReleaseBlocks()]
    assert source.state is HandoffState.DELIVERED
    source.check_invariants()


def test_the_destination_hears_of_drained_when_all_ranks_are() -> None:
    source = make_source()
    assert source.posting(part(0))
    source.abort("client gone")
    assert source.rank_ended(1) == []
    assert source.sent(part(0), None) == [SendDrained(), ReleaseBlocks()]


def test_a_nack_of_one_lane_resends_nothing_of_another() -> None:
    source = make_source()
    for blocks in (part(0), part(0, destination=1)):
        assert source.posting(blocks)
        source.sent(blocks, None)
    actions = source.nack(part(0, destination=1), "damaged", round_number=1, now=1.0)
    assert [action.blocks.destination for action in actions if hasattr(action, "blocks")] == [1]
