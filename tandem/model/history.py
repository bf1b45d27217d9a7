"""Which tokens a choice has seen, kept as arrays so that a whole batch's penalties are a few array operations.

Ids are unique, in order of first appearance after the prompt's (which are ascending); counts are of the output alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class TokenHistory:
    """The tokens of a prompt and of the output so far."""

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        ids = np.unique(np.asarray(prompt_token_ids, dtype=np.int64))
        self._slots: dict[int, int] = {token_id: slot for slot, token_id in enumerate(ids.tolist())}
        self._ids = ids
        self._counts = np.zeros(len(ids), dtype=np.float32)

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """Every token of prompt or output, once: `[num_seen]`."""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """How often the output holds each of `ids`: `[num_seen]`."""
        return self._counts[: len(self._slots)]

    def append(self, token_id: int) -> None:
        """The output goes on with a token."""
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self._ids):
            room = max(16, len(self._ids))
            self._ids = np.concatenate([self._ids, np.zeros(room, dtype=np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(room, dtype=np.float32)])
        self._ids[slot] = token_id
        self._counts[slot] += 1

    def copy(self) -> TokenHistory:
        """One that goes its own way from here."""
        other = TokenHistory(())
        other._slots = dict(self._slots)
        other._ids, other._counts = self._ids.copy(), self._counts.copy()
        return other
