"""What a worker holds of the store's memory: loans to read from, grants to write into. Owns no bytes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import torch

from tandem.kv.tiering import Tier, TierSpeed
from tandem.prefix_store.client_session import ClientSession

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Leading blocks of a prefix that the store can give, cumulative, and how quick it is where that was measured."""

    num_host: int = 0
    num_disk: int = 0
    num_remote: int = 0
    speeds: dict[Tier, TierSpeed] = field(default_factory=dict)
    """Of disk and remote; the worker measures for itself how fast it copies from the host tier."""

    def counts(self) -> dict[Tier, int]:
        """As `tiering.Prefix.found` wants them."""
        return {Tier.HOST: self.num_host, Tier.DISK: self.num_disk, Tier.REMOTE: self.num_remote}


class _Slots:
    """Slots of one session, as tensors. `index` counts in `slots`."""

    def __init__(self, session: ClientSession | None, slots: Sequence[int], num_layers: int) -> None:
        self.slots = tuple(slots)
        self._session = session
        self._num_layers = num_layers
        self._lock = threading.Lock()
        self._is_over = session is None

    @property
    def memory(self) -> torch.Tensor:
        """The whole slab, `[num_slots, block_bytes]` uint8; only `slots` are this one's to touch."""
        assert self._session is not None
        return self._session.slab.memory

    def block(self, index: int) -> torch.Tensor:
        """All bytes of a block: 1-D uint8 in shared memory, layer after layer."""
        assert self._session is not None
        return self._session.slab.tensor_of(self.slots[index])

    def layer(self, index: int, layer: int) -> torch.Tensor:
        """One layer's bytes of a block: 1-D uint8, `[2, num_kv_heads, block_size, head_dim]` of the model's dtype."""
        block = self.block(index)
        size = block.numel() // self._num_layers
        return block[layer * size : (layer + 1) * size]

    def _ends(self) -> bool:
        """True once."""
        with self._lock:
            is_first = not self._is_over
            self._is_over = True
            return is_first


class Loan(_Slots):
    """Leading blocks of a prefix in the host tier, kept there until `release`; none when `slots` is empty."""

    def __init__(
        self,
        session: ClientSession | None = None,
        number: int = 0,
        *,
        slots: Sequence[int] = (),
        generations: Sequence[int] = (),
        num_layers: int = 1,
    ) -> None:
        super().__init__(session, slots, num_layers)
        self._number = number
        self._generations = tuple(generations)

    def intact(self) -> bool:
        """Whether every slot still holds the block that was lent: ask after copying, and drop the copy if not.

        False only when this process was silent for longer than the store's lease.
        """
        return self._session is None or self._session.slab.generations_of(self.slots) == self._generations

    def release(self) -> None:
        """Nothing is read any more. Any thread, idempotent."""
        if self._ends() and self._session is not None:
            self._session.release(self._number)


Commit = Callable[[ClientSession, int, Sequence[int]], Awaitable[int]]


class Grant(_Slots):
    """Slots for blocks from `first` on, which nobody sees before `commit`; nothing to write when `slots` is empty.

    Must end with `commit` or `cancel`, and nothing may write into its slots after that.
    """

    def __init__(
        self,
        session: ClientSession | None = None,
        number: int = 0,
        *,
        first: int = 0,
        slots: Sequence[int] = (),
        num_layers: int = 1,
        commit: Commit | None = None,
    ) -> None:
        super().__init__(session, slots, num_layers)
        self.first = first
        self._number = number
        self._commit = commit

    async def commit(self, digests: Sequence[int]) -> int:
        """Makes the leading blocks visible whose digests (`slab.block_digest`) are given; how many. Event loop.

        0 when the store is away, or a digest is not that of the bytes.
        """
        if not self._ends() or self._session is None or self._commit is None:
            return 0
        return await self._commit(self._session, self._number, digests)

    def cancel(self) -> None:
        """Gives the slots back. Any thread, idempotent."""
        if self._ends() and self._session is not None:
            self._session.cancel(self._number)
