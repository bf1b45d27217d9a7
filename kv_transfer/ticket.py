"""What makes a handoff authentic: the codes on its offer, on its ticket, and on each of its messages. Pure.

A code is an HMAC with a key derived from the cluster's (`tandem/secret.py`) over claims: who hands what to whom, in
which incarnations, until when. The offer's says that the source belongs to the cluster and means this destination; the
ticket's says the same of the destination. Both then share a key for this one handoff that never travels, and every
message's header carries a code made with it, which the destination checks before a byte is placed.

Times are on the wall clock, which hosts share; `MAX_SKEW_S` is how far they may be apart.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from tandem.errors import TicketRefused
from tandem.secret import ClusterKey, ReplayGuard, same
from tandem.types import Epoch, HandoffId, RequestId, WorkerId

MAX_SKEW_S = 5.0
MAX_LIFETIME_S = 24 * 3600.0
"""Nothing is believed to be good for longer: what was used once must be remembered for as long."""
TAG_BYTES = 16
_OFFER, _TICKET, _LINK = "handoff-offer", "handoff-ticket", "handoff-link"


@dataclass(frozen=True, kw_only=True, slots=True)
class Claims:
    """One handoff between two incarnations. `expires_s`: wall clock, seconds since 1970."""

    handoff_id: HandoffId
    request_id: RequestId
    source: WorkerId
    source_epoch: Epoch
    destination: WorkerId
    destination_epoch: Epoch
    expires_s: float
    source_tp: int = 1
    source_pp: int = 1
    """How the source is cut into ranks."""

    def parts(self) -> list[bytes]:
        """The claims as bytes, in a fixed order. Milliseconds are what counts of the expiry."""
        names = (self.handoff_id, self.request_id, self.source, self.destination)
        numbers = (
            *(self.source_epoch, self.destination_epoch, expiry_ms(self.expires_s)),
            *(self.source_tp, self.source_pp),
        )
        return [name.encode() for name in names] + [number.to_bytes(16, "little") for number in numbers]


def expiry_ms(expires_s: float) -> int:
    """As it travels."""
    return round(expires_s * 1000)


def offer_code(key: ClusterKey, claims: Claims) -> bytes:
    """MAC_BYTES bytes that go with an offer."""
    return key.mac(_OFFER, claims.parts())


@dataclass(frozen=True, kw_only=True, slots=True)
class Reach:
    """How the ranks of a destination are reached over its transport, rank 0 first; there are `tp * pp` of them."""

    addresses: tuple[bytes, ...]
    tp: int = 1
    pp: int = 1

    def parts(self) -> list[bytes]:
        """As bytes, in a fixed order."""
        return [self.tp.to_bytes(4, "little"), self.pp.to_bytes(4, "little"), *self.addresses]


def ticket_code(key: ClusterKey, claims: Claims, *, first_block: int, lease_s: float, reach: Reach) -> bytes:
    """MAC_BYTES bytes that go with a ticket: also over what the source will act upon."""
    promise = [first_block.to_bytes(16, "little"), round(lease_s * 1000).to_bytes(16, "little"), *reach.parts()]
    return key.mac(_TICKET, claims.parts() + promise)


def check_code(expected: bytes, given: bytes, *, what: str) -> None:
    """Raises TicketRefused unless both are the same code."""
    if not same(expected, given):
        raise TicketRefused(f"{what} does not carry this cluster's code")


def link_key(key: ClusterKey, claims: Claims) -> bytes:
    """The key of one handoff's messages, known to its two workers."""
    return key.mac(_LINK, claims.parts())


def header_tag(link: bytes, header: bytes) -> bytes:
    """TAG_BYTES bytes over a packed header without its tag: keyed BLAKE2b, about two microseconds."""
    return hashlib.blake2b(header, digest_size=TAG_BYTES, key=link).digest()


class OfferBook:
    """The destination's judgement of offers: each is good for one incarnation of one worker, once. Not thread-safe."""

    def __init__(self, key: ClusterKey, *, worker_id: WorkerId, epoch: Epoch) -> None:
        self._key = key
        self._worker_id = worker_id
        self._epoch = epoch
        self._used = ReplayGuard()

    def take(self, claims: Claims, code: bytes, now: float) -> None:
        """Uses an offer up. Raises TicketRefused for a forged, misdirected, expired or repeated one.

        The code is looked at first: without the key nobody learns or changes anything here.
        """
        what = f"the offer of handoff {claims.handoff_id}"
        check_code(offer_code(self._key, claims), code, what=what)
        if (claims.destination, claims.destination_epoch) != (self._worker_id, self._epoch):
            raise TicketRefused(
                f"{what} is for {claims.destination} in epoch {claims.destination_epoch}, "
                f"this is {self._worker_id} in epoch {self._epoch}"
            )
        if now >= claims.expires_s + MAX_SKEW_S:
            raise TicketRefused(f"{what} expired {now - claims.expires_s:.1f} s ago")
        if claims.expires_s > now + MAX_LIFETIME_S:
            raise TicketRefused(f"{what} would be good for longer than {MAX_LIFETIME_S:g} s")
        if not self._used.use(claims.handoff_id.encode(), expires_s=claims.expires_s + MAX_SKEW_S, now=now):
            raise TicketRefused(f"{what} was used before")
