"""Codes of offers, tickets and messages: what is forged, changed, late, repeated or meant for another is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kv_transfer.offer import Offer, TicketOffice
from kv_transfer.ticket import MAX_LIFETIME_S, MAX_SKEW_S, Claims, Reach, header_tag, link_key
from kv_transfer.transport import MessageHeader
from tandem.errors import HandoffFailed, TicketRefused
from tandem.rpc.tandem.v1 import worker_pb2
from tandem.secret import ClusterKey
from tandem.types import Epoch, HandoffId, RequestId, WorkerId
from tests.factories import CLUSTER_KEY

OTHER_KEY = ClusterKey(b"o" * 32)
NOW = 1_700_000_000.0
CLAIMS = Claims(
    handoff_id=HandoffId("ab" * 16),
    request_id=RequestId("r"),
    source=WorkerId("prefill-0"),
    source_epoch=Epoch(3),
    destination=WorkerId("decode-0"),
    destination_epoch=Epoch(4),
    expires_s=NOW + 30.0,
)


def make_offer(key: ClusterKey = CLUSTER_KEY, **claims: Any) -> Offer:
    return Offer(key=key, claims=replace(CLAIMS, **claims), num_prompt_tokens=5, fingerprint="f")


def make_office() -> TicketOffice:
    return TicketOffice(CLUSTER_KEY, worker_id=WorkerId("decode-0"), epoch=Epoch(4))


def make_ticket(key: ClusterKey = CLUSTER_KEY, **claims: Any) -> worker_pb2.Ticket:
    office = TicketOffice(key, worker_id=WorkerId("decode-0"), epoch=Epoch(4))
    reach = Reach(addresses=(b"there",))
    return office.ticket(replace(CLAIMS, **claims), first_block=2, lease_s=10.0, transport="shm", reach=reach)


def test_an_honest_offer_is_taken_for_what_it_claims() -> None:
    assert make_office().take(make_offer().message, now=NOW) == CLAIMS


@pytest.mark.parametrize(
    ("offer", "why"),
    [
        (make_offer(OTHER_KEY), "does not carry"),
        (make_offer(destination=WorkerId("decode-1")), "is for decode-1"),
        (make_offer(destination_epoch=Epoch(3)), "epoch 3"),
        (make_offer(expires_s=NOW - MAX_SKEW_S - 0.1), "expired"),
        (make_offer(expires_s=NOW + MAX_LIFETIME_S + 1), "longer"),
    ],
)
def test_an_offer_that_is_not_for_here_and_now_is_refused(offer: Offer, why: str) -> None:
    with pytest.raises(TicketRefused, match=why):
        make_office().take(offer.message, now=NOW)


@pytest.mark.parametrize(
    "change",
    [
        {"handoff_id": "cd" * 16},
        {"request_id": "another"},
        {"prefill_worker_id": "prefill-1"},
        {"prefill_epoch": 9},
        {"decode_worker_id": "decode-1"},
        {"decode_epoch": 9},
        {"expires_ms": 2**64 - 1},
        {"tensor_parallel": 2},
        {"pipeline_parallel": 2},
        {"code": b""},
        {"code": bytes(32)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_an_offer_that_was_changed_is_refused_and_the_true_one_is_still_taken(change: dict[str, Any]) -> None:
    office = make_office()
    changed = make_offer().message
    for name, value in change.items():
        setattr(changed, name, value)
    with pytest.raises(TicketRefused, match="does not carry"):
        office.take(changed, now=NOW)
    office.take(make_offer().message, now=NOW)


def test_an_offer_is_good_once_as_long_as_it_is_good_at_all() -> None:
    office = make_office()
    office.take(make_offer().message, now=NOW)
    with pytest.raises(TicketRefused, match="used before"):
        office.take(make_offer().message, now=NOW + 29.0)
    with pytest.raises(TicketRefused, match="expired"):
        office.take(make_offer().message, now=NOW + 30.0 + MAX_SKEW_S)


def test_an_honest_ticket_gives_both_sides_the_same_key() -> None:
    ticket = make_ticket(expires_s=NOW + 20.0)
    assert make_offer().accept(ticket, now=NOW) == make_office().link_key(replace(CLAIMS, expires_s=NOW + 20.0))


@pytest.mark.parametrize(
    "change",
    [
        {"handoff_id": "cd" * 16},
        {"epoch": 9},
        {"first_block": 0},
        {"lease_s": 20.0},
        {"transport_address": b"elsewhere"},
        {"expires_ms": 2**63},
        {"tensor_parallel": 2},
        {"pipeline_parallel": 2},
        {"code": b""},
        {"code": bytes(32)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_ticket_that_was_changed_is_refused(change: dict[str, Any]) -> None:
    ticket = make_ticket()
    for name, value in change.items():
        setattr(ticket, name, value)
    with pytest.raises(TicketRefused):
        make_offer().accept(ticket, now=NOW)


def test_a_ticket_that_names_another_rank_is_refused() -> None:
    ticket = make_ticket()
    ticket.rank_addresses.append(b"elsewhere")
    with pytest.raises(TicketRefused):
        make_offer().accept(ticket, now=NOW)


def test_a_ticket_without_an_address_for_each_rank_is_refused() -> None:
    ticket = make_office().ticket(
        CLAIMS, first_block=0, lease_s=10.0, transport="shm", reach=Reach(addresses=(b"there",), tp=2)
    )
    with pytest.raises(HandoffFailed, match="1 addresses for 2 ranks"):
        make_offer().accept(ticket, now=NOW)


@pytest.mark.parametrize(
    ("ticket", "why"),
    [
        (make_ticket(OTHER_KEY), "does not carry"),
        (make_ticket(handoff_id=HandoffId("cd" * 16)), "does not carry"),
        (make_ticket(destination_epoch=Epoch(5)), "does not carry"),
        (make_ticket(expires_s=NOW - MAX_SKEW_S - 0.1), "expired"),
    ],
)
def test_another_handoffs_ticket_is_refused(ticket: worker_pb2.Ticket, why: str) -> None:
    with pytest.raises(TicketRefused, match=why):
        make_offer().accept(ticket, now=NOW)


@pytest.mark.parametrize("change", [{"lease_s": 0.0}, {"lease_s": float("nan")}, {"lease_s": 1e9}, {"first_block": -1}])
def test_a_promise_out_of_bounds_is_refused(change: dict[str, Any]) -> None:
    ticket = make_ticket()
    for name, value in change.items():
        setattr(ticket, name, value)
    with pytest.raises(HandoffFailed):
        make_offer().accept(ticket, now=NOW)


HEADER = MessageHeader(
    handoff_id=CLAIMS.handoff_id, epoch=Epoch(4), layer=1, first_block=2, num_blocks=3, num_bytes=99, digest=7
)


def test_a_sealed_header_survives_the_wire_with_its_code() -> None:
    key = link_key(CLUSTER_KEY, CLAIMS)
    assert MessageHeader.unpack(HEADER.sealed(key).pack()).is_sealed(key)
    assert header_tag(key, b"x") != header_tag(link_key(OTHER_KEY, CLAIMS), b"x")


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": 5},
        {"layer": 0},
        {"num_layers": 2},
        {"first_block": 1},
        {"num_blocks": 4},
        {"num_bytes": 98},
        {"digest": 0},
        {"handoff_id": "cd" * 16},
        {"source_rank": 1},
        {"destination_rank": 1},
        {"first_head": 1},
        {"num_heads": 1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_header_that_was_changed_is_not_sealed(change: dict[str, Any]) -> None:
    key = link_key(CLUSTER_KEY, CLAIMS)
    assert not replace(HEADER.sealed(key), **change).is_sealed(key)
    assert not HEADER.is_sealed(key)
