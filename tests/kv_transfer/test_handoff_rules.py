"""Single rules of the two handoff machines that the clocks would otherwise make good, only later."""

from __future__ import annotations

from kv_transfer.destination import DestinationHandoff
from kv_transfer.handoff import (
    Action,
    BlockRange,
    Deliver,
    Failed,
    Fence,
    HandoffState,
    Record,
    ReleaseBlocks,
    Resend,
    SendAbort,
    SendDelivered,
    SendDrained,
    SendNack,
    SendTicket,
    StopReceiving,
    combined_digest,
)
from kv_transfer.plan import only_lane
from kv_transfer.source import SourceHandoff
from tandem.types import Epoch

LEASE_S = 10.0
FIRST = BlockRange(layer=0, first_block=0, num_blocks=2)
SECOND = BlockRange(layer=1, first_block=0, num_blocks=2)


def make_source(*, max_resends: int = 1) -> SourceHandoff:
    source = SourceHandoff(lease_s=LEASE_S, max_resends=max_resends, now=0.0)
    source.ticket(epoch=Epoch(3), lease_s=LEASE_S, first_block=0, now=0.0)
    return source


def make_destination() -> DestinationHandoff:
    destination = DestinationHandoff(epoch=Epoch(3), lanes=[only_lane(2, 1)], num_blocks=2, lease_s=LEASE_S, now=0.0)
    destination.reserved()
    return destination


def make_record(*digests: int) -> Record:
    return Record(
        first=(),
        num_cached_tokens=0,
        num_messages=len(digests),
        digest=combined_digest(digests),
    )


def kinds(actions: list[Action]) -> list[type[Action]]:
    return [type(action) for action in actions]


def test_a_nack_that_is_quicker_than_the_send_is_answered_when_the_send_is_over() -> None:
    source = make_source()
    assert source.posting(FIRST)
    assert source.nack(FIRST, "bit flip", round_number=1, now=1.0) == []
    assert source.sent(FIRST, None) == [Resend(blocks=FIRST)]


def test_a_nack_of_several_messages_in_one_range_resends_each_of_them_as_it_was() -> None:
    halves = [BlockRange(layer=0, first_block=0, num_blocks=1), BlockRange(layer=0, first_block=1, num_blocks=1)]
    source = make_source()
    for blocks in [*halves, SECOND]:
        assert source.posting(blocks)
        assert source.sent(blocks, None) == []
    expected = [Resend(blocks=blocks) for blocks in halves]
    assert source.nack(FIRST, "it did not arrive", round_number=1, now=1.0) == expected


def test_nothing_is_posted_before_the_ticket_or_once_the_handoff_is_over() -> None:
    assert not SourceHandoff(lease_s=LEASE_S, max_resends=1, now=0.0).posting(FIRST)
    aborting, delivered = make_source(), make_source()
    for source in (aborting, delivered):
        assert source.posting(FIRST)
    aborting.abort("client gone")
    assert not aborting.posting(SECOND)
    delivered.delivered(now=1.0)
    assert not delivered.posting(SECOND)


def test_a_range_is_resent_only_so_often() -> None:
    source = make_source(max_resends=2)
    assert source.posting(FIRST)
    for _ in range(2):
        assert source.sent(FIRST, "lost") == [Resend(blocks=FIRST)]
        assert source.posting(FIRST)
    assert kinds(source.sent(FIRST, "lost")) == [SendAbort, Failed, SendDrained, ReleaseBlocks]


def test_a_nack_that_came_too_early_does_not_fail_a_handoff() -> None:
    source = make_source(max_resends=0)
    assert source.posting(FIRST)
    assert source.nack(FIRST, "it did not arrive", round_number=1, now=1.0) == []
    assert source.sent(FIRST, None) == []
    assert source.may_send


def test_a_send_that_hangs_after_delivery_to_a_peer_that_went_is_fenced_after_a_lease() -> None:
    source = make_source()
    assert source.posting(FIRST)
    assert source.delivered(now=1.0) == []
    assert source.peer_lost("closed", now=1.0) == []
    assert source.tick(1.0 + LEASE_S - 0.1) == []
    assert source.tick(1.0 + LEASE_S) == [Fence()]
    assert source.sent(FIRST, "closed") == [ReleaseBlocks()]
    assert source.state is HandoffState.DELIVERED


def test_a_destination_that_says_nothing_for_a_lease_is_given_up_by_the_source_alone() -> None:
    source = make_source()
    assert source.posting(FIRST)
    source.renewed(now=1.0)
    assert source.tick(1.0 + LEASE_S - 0.1) == []
    assert kinds(source.tick(1.0 + LEASE_S)) == [SendAbort, Failed, Fence]
    assert kinds(source.sent(FIRST, "closed")) == [SendDrained, ReleaseBlocks]


def test_an_aborted_source_that_renews_does_not_put_off_its_fence() -> None:
    destination = make_destination()
    destination.abort("client gone")
    destination.renewed(now=LEASE_S - 0.1)
    assert destination.tick(LEASE_S) == [Fence()]


def test_a_digest_that_does_not_match_fails_the_handoff() -> None:
    destination = make_destination()
    for blocks, digest in ((FIRST, 5), (SECOND, 6)):
        assert destination.may_place(blocks, Epoch(3))
        assert destination.landed(blocks, digest=digest, error=None) == []
    assert kinds(destination.record(make_record(5, 7))) == [SendAbort, Failed, StopReceiving]


def test_what_is_missing_is_asked_for_after_half_a_lease_of_standstill() -> None:
    destination = make_destination()
    assert destination.may_place(FIRST, Epoch(3))
    assert destination.landed(FIRST, digest=5, error=None) == []
    assert destination.record(make_record(5, 6)) == []
    assert destination.tick(1.0) == []
    assert destination.tick(1.0 + LEASE_S / 2 - 0.1) == []
    assert destination.tick(1.0 + LEASE_S / 2) == [SendNack(blocks=SECOND, reason="it did not arrive", round=1)]


def test_nothing_is_missing_before_the_record_has_come() -> None:
    destination = make_destination()
    for now in (1.0, 4.0, 7.0, 9.0):
        assert destination.tick(now) == []


def test_a_source_told_of_its_delivery_fences_a_repeated_send_that_never_ends() -> None:
    source = make_source()
    assert source.posting(FIRST)
    source.nack(FIRST, "it did not arrive", round_number=1, now=1.0)
    assert source.sent(FIRST, None) == [Resend(blocks=FIRST)]
    assert source.posting(FIRST)
    assert source.delivered(now=2.0) == []
    assert source.tick(3.0) == []
    assert source.tick(3.0 + LEASE_S) == [Fence()]
    assert source.sent(FIRST, "closed") == [ReleaseBlocks()]
    assert source.state is HandoffState.DELIVERED


BOTH = BlockRange(layer=0, num_layers=2, first_block=0, num_blocks=2)


def test_a_message_of_two_layers_fills_both_and_is_refused_when_either_has_its_blocks() -> None:
    destination = make_destination()
    assert destination.may_place(BOTH, Epoch(3))
    assert not destination.may_place(SECOND, Epoch(3))
    assert destination.landed(BOTH, digest=5, error=None) == []
    assert not destination.may_place(SECOND, Epoch(3))
    assert destination.missing() == []


def test_what_is_missing_in_neighbouring_layers_is_asked_for_as_one_range() -> None:
    assert make_destination().missing() == [BOTH]


def test_several_nacks_of_one_round_resend_a_message_once() -> None:
    source = make_source()
    assert source.posting(BOTH)
    assert source.sent(BOTH, None) == []
    assert source.nack(FIRST, "it did not arrive", round_number=1, now=1.0) == [Resend(blocks=BOTH)]
    assert source.posting(BOTH)
    assert source.sent(BOTH, None) == []
    assert source.nack(SECOND, "it did not arrive", round_number=1, now=1.0) == []
    assert kinds(source.nack(SECOND, "it did not arrive", round_number=2, now=2.0))[:2] == [SendAbort, Failed]


def test_a_second_record_changes_nothing() -> None:
    destination = make_destination()
    assert destination.record(make_record(5)) == []
    assert destination.record(make_record(6)) == []
    assert destination.may_place(BOTH, Epoch(3))
    assert destination.landed(BOTH, digest=5, error=None) == [SendDelivered(), Deliver(record=make_record(5))]


def test_as_many_messages_as_were_sent_are_not_all_blocks_of_all_layers() -> None:
    destination = make_destination()
    assert destination.may_place(FIRST, Epoch(3))
    assert destination.landed(FIRST, digest=5, error=None) == []
    assert destination.record(make_record(5)) == []
    assert destination.missing() == [SECOND]


def test_aborted_blocks_are_held_until_receives_have_stopped_though_the_writer_has() -> None:
    destination = make_destination()
    assert kinds(destination.peer_aborted("client gone")) == [Failed, StopReceiving]
    assert destination.peer_drained() == []
    assert destination.receives_stopped() == [ReleaseBlocks()]


def test_aborted_blocks_are_held_until_the_writer_has_stopped_though_receives_have() -> None:
    destination = make_destination()
    destination.peer_aborted("client gone")
    assert destination.receives_stopped() == []
    assert destination.peer_drained() == [ReleaseBlocks()]


def test_nothing_that_comes_after_delivery_gives_the_sequences_blocks_away() -> None:
    destination = make_destination()
    assert destination.may_place(BOTH, Epoch(3))
    destination.landed(BOTH, digest=5, error=None)
    assert kinds(destination.record(make_record(5))) == [SendDelivered, Deliver]
    assert destination.tick(2 * LEASE_S) == destination.abort("client gone") == destination.peer_lost("closed") == []
    assert destination.peer_drained() == destination.receives_stopped() == destination.fenced() == []


def test_aborted_blocks_are_held_until_what_was_placed_has_landed() -> None:
    destination = make_destination()
    assert destination.may_place(FIRST, Epoch(3))
    destination.peer_aborted("client gone")
    assert destination.peer_drained() == destination.receives_stopped() == []
    assert destination.landed(FIRST, digest=5, error=None) == [ReleaseBlocks()]


def test_blocks_that_are_held_already_are_neither_wanted_nor_missing() -> None:
    destination = DestinationHandoff(epoch=Epoch(3), lanes=[only_lane(2, 1)], num_blocks=3, lease_s=LEASE_S, now=0.0)
    assert destination.reserved(first_block=2) == [SendTicket(epoch=Epoch(3), lease_s=LEASE_S, first_block=2)]
    assert not destination.may_place(BlockRange(layer=0, first_block=1, num_blocks=2), Epoch(3))
    assert destination.missing() == [BlockRange(layer=0, num_layers=2, first_block=2, num_blocks=1)]
