"""Offer and ticket as messages: who makes them, who may believe them. What the codes cover is `ticket.py`'s."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from kv_transfer.ticket import (
    MAX_SKEW_S,
    Claims,
    OfferBook,
    Reach,
    check_code,
    expiry_ms,
    link_key,
    offer_code,
    ticket_code,
)
from tandem.errors import HandoffFailed, TicketRefused
from tandem.rpc.tandem.v1 import worker_pb2
from tandem.secret import ClusterKey
from tandem.types import Epoch, HandoffId, RequestId, WorkerId

MAX_LEASE_S = 600.0
"""Longest lease that is believed; `tandem.config` allows no longer one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """The source's half."""

    key: ClusterKey
    claims: Claims
    num_prompt_tokens: int
    fingerprint: str
    message: worker_pb2.HandoffOffer = field(init=False)

    def __post_init__(self) -> None:
        claims = self.claims
        message = worker_pb2.HandoffOffer(
            handoff_id=claims.handoff_id,
            request_id=claims.request_id,
            prefill_worker_id=claims.source,
            prefill_epoch=claims.source_epoch,
            num_prompt_tokens=self.num_prompt_tokens,
            fingerprint=self.fingerprint,
            decode_worker_id=claims.destination,
            decode_epoch=claims.destination_epoch,
            expires_ms=expiry_ms(claims.expires_s),
            code=offer_code(self.key, claims),
            tensor_parallel=claims.source_tp,
            pipeline_parallel=claims.source_pp,
        )
        object.__setattr__(self, "message", message)

    def accept(self, ticket: worker_pb2.Ticket, *, now: float) -> bytes:
        """The key for the handoff's messages. Raises TicketRefused, or HandoffFailed for a promise out of bounds.

        `now` is wall clock.
        """
        claims = replace(self.claims, expires_s=ticket.expires_ms / 1000)
        what = f"the ticket of handoff {claims.handoff_id}"
        lease_s = ticket.lease_s
        if not (math.isfinite(lease_s) and 0 < lease_s <= MAX_LEASE_S) or ticket.first_block < 0:
            raise HandoffFailed(f"{what} has a lease of {lease_s} s and begins at block {ticket.first_block}")
        expected = ticket_code(
            self.key, claims, first_block=ticket.first_block, lease_s=lease_s, reach=reach_of(ticket)
        )
        check_code(expected, ticket.code, what=what)
        if (ticket.handoff_id, ticket.epoch) != (claims.handoff_id, claims.destination_epoch):
            raise TicketRefused(f"{what} is for handoff {ticket.handoff_id} in epoch {ticket.epoch}")
        reach = reach_of(ticket)
        if len(reach.addresses) != reach.tp * reach.pp:
            raise HandoffFailed(f"{what} has {len(reach.addresses)} addresses for {reach.tp * reach.pp} ranks")
        if now >= claims.expires_s + MAX_SKEW_S:
            raise TicketRefused(f"{what} expired {now - claims.expires_s:.1f} s ago")
        return link_key(self.key, claims)


def reach_of(ticket: worker_pb2.Ticket) -> Reach:
    """How to reach the destination that wrote a ticket."""
    return Reach(
        addresses=(ticket.transport_address, *ticket.rank_addresses),
        tp=ticket.tensor_parallel or 1,
        pp=ticket.pipeline_parallel or 1,
    )


def claims_of(offer: worker_pb2.HandoffOffer) -> Claims:
    """What an offer claims; nobody has looked at its code yet."""
    return Claims(
        handoff_id=HandoffId(offer.handoff_id),
        request_id=RequestId(offer.request_id),
        source=WorkerId(offer.prefill_worker_id),
        source_epoch=Epoch(offer.prefill_epoch),
        destination=WorkerId(offer.decode_worker_id),
        destination_epoch=Epoch(offer.decode_epoch),
        expires_s=offer.expires_ms / 1000,
        source_tp=offer.tensor_parallel or 1,
        source_pp=offer.pipeline_parallel or 1,
    )


class TicketOffice:
    """The destination's half: takes offers, each once, and writes tickets. Event loop only."""

    def __init__(self, key: ClusterKey, *, worker_id: WorkerId, epoch: Epoch) -> None:
        self.epoch = epoch
        self._key = key
        self._book = OfferBook(key, worker_id=worker_id, epoch=epoch)

    def take(self, offer: worker_pb2.HandoffOffer, *, now: float) -> Claims:
        """What the offer claims, used up. Raises TicketRefused. `now` is wall clock."""
        claims = claims_of(offer)
        self._book.take(claims, offer.code, now)
        return claims

    def link_key(self, claims: Claims) -> bytes:
        """The key of the handoff's messages, of the ticket's claims."""
        return link_key(self._key, claims)

    def ticket(
        self, claims: Claims, *, first_block: int, lease_s: float, transport: str, reach: Reach
    ) -> worker_pb2.Ticket:
        """Good until the claims expire."""
        return worker_pb2.Ticket(
            handoff_id=claims.handoff_id,
            epoch=claims.destination_epoch,
            lease_s=lease_s,
            first_block=first_block,
            transport=transport,
            transport_address=reach.addresses[0],
            rank_addresses=reach.addresses[1:],
            tensor_parallel=reach.tp,
            pipeline_parallel=reach.pp,
            expires_ms=expiry_ms(claims.expires_s),
            code=ticket_code(self._key, claims, first_block=first_block, lease_s=lease_s, reach=reach),
        )
