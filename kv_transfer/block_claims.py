"""What makes a fetch between two stores authentic. Pure.

The fetching store is the destination of a transfer as in a handoff. Its code covers who asks whom for which blocks,
until when, and where they are to be sent; the key of the messages follows from the same claims and never travels.
"""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.ticket import Claims, check_code
from tandem.secret import ClusterKey
from tandem.types import Epoch, HandoffId, RequestId, WorkerId

_PURPOSE = "store-fetch"


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchClaims:
    """One fetch. `names` are 16 bytes each, one after another; the first `first` are not asked for."""

    transfer_id: HandoffId
    source: WorkerId
    source_epoch: Epoch
    destination: WorkerId
    destination_epoch: Epoch
    expires_s: float
    address: bytes
    names: bytes
    first: int

    def claims(self) -> Claims:
        """As a handoff's: who, whom, until when."""
        return Claims(
            handoff_id=self.transfer_id,
            request_id=RequestId(""),
            source=self.source,
            source_epoch=self.source_epoch,
            destination=self.destination,
            destination_epoch=self.destination_epoch,
            expires_s=self.expires_s,
        )


def fetch_code(key: ClusterKey, fetch: FetchClaims) -> bytes:
    """MAC_BYTES bytes that go with a fetch."""
    return key.mac(_PURPOSE, [*fetch.claims().parts(), fetch.address, fetch.names, fetch.first.to_bytes(8, "little")])


def check_fetch(key: ClusterKey, fetch: FetchClaims, code: bytes) -> None:
    """Raises TicketRefused for a code of another cluster or other claims."""
    check_code(fetch_code(key, fetch), code, what=f"the fetch {fetch.transfer_id}")
