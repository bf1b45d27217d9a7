"""The seams below the host tier: the disk of this node, and the host tiers of other nodes. Both only load and store."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tandem.types import BlockHash


class DiskCounters(Protocol):
    """What a disk tier has counted since it was opened."""

    @property
    def evictions(self) -> int:
        """Blocks that made room."""


class DiskLevel(Protocol):
    """How full a disk tier is."""

    @property
    def blocks(self) -> int:
        """Blocks that it has."""

    @property
    def max_blocks(self) -> int:
        """Blocks that it can have."""

    @property
    def counters(self) -> DiskCounters:
        """So far."""


class DiskStore(Protocol):
    """What the store needs of a disk tier. Thread-safe; calls return at once, files are read and written elsewhere."""

    def match(self, names: Sequence[BlockHash]) -> int:
        """How many leading names it has."""

    def use(self, names: Sequence[BlockHash]) -> int:
        """Like `match`, and counts as a use of them."""

    def names(self) -> Sequence[BlockHash]:
        """All that it has."""

    def chain(self, name: BlockHash) -> Sequence[BlockHash]:
        """The prefix that a block ends, first to last; empty when it is not here."""

    def put(self, names: Sequence[BlockHash], payloads: Sequence[memoryview], *, tenant: str = "") -> Future[Any]:
        """Stores what it lacks of a prefix, first block to last, a payload for each."""

    def read(self, names: Sequence[BlockHash], destinations: Sequence[memoryview]) -> Future[int]:
        """Fills `destinations`; how many leading ones are whole and right."""

    def pin(self, name: BlockHash) -> Any:
        """Keeps a block that it has until as many unpins."""

    def unpin(self, name: BlockHash) -> Any:
        """Takes one pin away."""

    def remove(self, names: Sequence[BlockHash]) -> Any:
        """Forgets blocks and what is only reached through them."""

    def clear(self) -> Future[int]:
        """Forgets everything; how much that was."""

    def verify(self) -> Future[Any]:
        """Reads everything again; damaged blocks are removed. Has `checked` and `damaged`."""

    def stats(self) -> DiskLevel:
        """How full it is."""

    def close(self) -> None:
        """Ends what is under way; no destination is written afterwards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """What came from a peer: the digests of the leading blocks that are whole, and how many came damaged."""

    digests: list[int]
    num_damaged: int = 0


class RemoteTier(Protocol):
    """The host tiers of other nodes. Event loop only."""

    def match(self, names: Sequence[BlockHash]) -> int:
        """How many leading names the best peer has, as far as is known here."""

    async def fetch(
        self, names: Sequence[BlockHash], *, first: int, destinations: Sequence[torch.Tensor], timeout_s: float
    ) -> Fetched:
        """Fills `destinations` with `names[first:]` from a peer, as far as that has them.

        Never raises but for cancellation; when it returns or is cancelled, nothing writes `destinations` any more.
        """
