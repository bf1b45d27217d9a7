"""What the blocks of one request's prompt are called: hashed once for each kind of worker that it may go to. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.kv.hashing import CacheIdentity, block_hashes, root_hash
from tandem.types import PromptPrefix


class PromptNames:
    """Names of a prompt, by workers' fingerprints: usually there is one."""

    def __init__(self, token_ids: Sequence[int], *, salt: str) -> None:
        self._token_ids = token_ids
        self._salt = salt
        self._known: dict[str, PromptPrefix] = {}

    def of(self, fingerprint: str, block_size: int) -> PromptPrefix:
        """For workers of this fingerprint, whose blocks have `block_size` tokens."""
        if fingerprint not in self._known:
            root = root_hash(CacheIdentity(fingerprint=fingerprint, salt=self._salt))
            blocks = block_hashes(root, self._token_ids, block_size)
            self._known[fingerprint] = PromptPrefix(root=root, blocks=blocks, tenant=self._salt)
        return self._known[fingerprint]
