"""What a store is told of how to work: sizes, limits, and when bytes are checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tandem.errors import ConfigError
from tandem.kv.tiering import WritePolicy

Check = Literal["commit", "read", "off"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreSettings:
    """Bounds are checked here, so that the parts need not."""

    fingerprint: str
    """Of the model and layout whose blocks it holds; see `tandem.model.spec.fingerprint`."""
    block_bytes: int
    """Bytes of a block, all layers."""
    num_slots: int
    """Blocks of the host tier."""
    write_policy: WritePolicy = "through"
    """When blocks go to disk."""
    check: Check = "commit"
    """When a block's bytes are held against its checksum: once when it is committed, at each loan, or never."""
    lease_s: float = 10.0
    """How long a silent client keeps its loans."""
    max_loads: int = 16
    """Loads from disk and from peers at a time; what is wanted beyond is a miss."""
    fetch_timeout_s: float = 5.0
    """How long a peer may take to send what it has."""
    max_writing_blocks: int = 16384
    """Blocks that wait to be written to disk; what comes beyond is not written."""
    max_copied_blocks: int = 256
    """Of them, those that had to leave the host tier: copies in memory of their own."""

    def __post_init__(self) -> None:
        bounds = {
            "block_bytes": self.block_bytes >= 1,
            "num_slots": self.num_slots >= 1,
            "lease_s": 0.2 <= self.lease_s <= 600,
            "max_loads": self.max_loads >= 1,
            "fetch_timeout_s": self.fetch_timeout_s > 0,
            "max_writing_blocks": self.max_writing_blocks >= 1,
            "max_copied_blocks": self.max_copied_blocks >= 1,
        }
        for name, ok in bounds.items():
            if not ok:
                raise ConfigError(f"the store's {name} is out of bounds: {getattr(self, name)!r}", param=name)
