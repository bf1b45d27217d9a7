"""The cluster's key and what is derived from it. Pure: where a key comes from is `tandem/key_source.py`'s.

Whoever holds the key may call workers and hand KV over; nobody else may. A key for each purpose is derived from it, so
that what is made for one can never be taken for another.
"""

from __future__ import annotations

import hashlib
import heapq
import hmac
from collections.abc import Iterable

from tandem.errors import ConfigError

KEY_BYTES = 32
MAC_BYTES = 32
MIN_HEX_DIGITS = 2 * 16


class ClusterKey:
    """Never shown: its repr is a fingerprint. Equal keys are equal whatever process holds them."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        if len(secret) * 2 < MIN_HEX_DIGITS:
            raise ConfigError(f"a cluster key has at least {MIN_HEX_DIGITS} hex digits, got {2 * len(secret)}")
        self._secret = secret

    @classmethod
    def from_hex(cls, text: str) -> ClusterKey:
        """From hex digits; white space around them is fine. Raises ConfigError, which does not repeat the text."""
        try:
            return cls(bytes.fromhex(text.strip()))
        except ValueError as exc:
            raise ConfigError("a cluster key is hex digits, as `openssl rand -hex 32` prints them") from exc

    def to_hex(self) -> str:
        """Inverse of `from_hex`: for handing it to a child process, for nothing else."""
        return self._secret.hex()

    def derive(self, purpose: str) -> bytes:
        """A key of KEY_BYTES bytes for one purpose."""
        return hmac.digest(self._secret, b"tandem-key/1/" + purpose.encode(), "sha256")

    def mac(self, purpose: str, parts: Iterable[bytes]) -> bytes:
        """HMAC-SHA256 over `parts`, each with its length before it, so that no two lists of parts are alike."""
        return hmac.digest(self.derive(purpose), joined(parts), "sha256")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClusterKey) and hmac.compare_digest(self._secret, other._secret)

    def __hash__(self) -> int:
        return hash(self.derive("hash"))

    def __repr__(self) -> str:
        return f"ClusterKey(fingerprint {hashlib.sha256(self.derive('fingerprint')).hexdigest()[:8]})"


def joined(parts: Iterable[bytes]) -> bytes:
    """`parts` one after another, each behind its length (4 bytes, little-endian)."""
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def same(expected: bytes, given: bytes) -> bool:
    """Whether two codes are equal, in a time that does not tell where they differ."""
    return hmac.compare_digest(expected, given)


class ReplayGuard:
    """Remembers what may be used once until it would be refused as expired anyway. Not thread-safe."""

    def __init__(self) -> None:
        self._used: set[bytes] = set()
        self._by_expiry: list[tuple[float, bytes]] = []

    def __len__(self) -> int:
        return len(self._used)

    def use(self, name: bytes, *, expires_s: float, now: float) -> bool:
        """False when `name` was used before. Kept until `expires_s`; both on one clock."""
        while self._by_expiry and self._by_expiry[0][0] <= now:
            self._used.discard(heapq.heappop(self._by_expiry)[1])
        if name in self._used:
            return False
        self._used.add(name)
        heapq.heappush(self._by_expiry, (expires_s, name))
        return True
