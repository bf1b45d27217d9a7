"""What is known of a message that was sent."""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.handoff import BlockRange


@dataclass(frozen=True, kw_only=True, slots=True)
class SentMessage:
    """One message of a transfer; times on this host's monotonic clock."""

    blocks: BlockRange
    num_bytes: int
    posted_s: float
    done_s: float
