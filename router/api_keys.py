"""Who may send requests: the keys of a file, one a line, read again when it changes. Compares in constant time."""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Sequence
from pathlib import Path

from tandem.errors import ConfigError, Unauthenticated
from tandem.file_stamp import stamp_of

logger = logging.getLogger(__name__)

_SCHEME = "bearer"


class ApiKeys:
    """Event loop only. Empty lines and those that begin with # hold no key.

    A file that is emptied lets nobody in; one that is gone, or cannot be read, leaves the last keys in force.
    """

    def __init__(self, path: Path) -> None:
        """Raises ConfigError when the file cannot be read or holds no key."""
        self._path = path
        self._stamp = stamp_of([path])
        self._digests = _read(path)
        if not self._digests:
            raise ConfigError(f"router.api_keys_file {path} holds no key", param="router.api_keys_file")

    def check(self, authorization: str | None) -> None:
        """Raises Unauthenticated unless the header's value is "Bearer KEY" with one of the keys."""
        if not authorization:
            raise Unauthenticated('an API key is needed: send the header "authorization: Bearer KEY"')
        scheme, _, key = authorization.strip().partition(" ")
        if scheme.lower() != _SCHEME:
            raise Unauthenticated(f'the authorization header must be "Bearer KEY", not {scheme!r}')
        if not self._knows(key.strip()):
            raise Unauthenticated("this API key is not known here")

    def _knows(self, key: str) -> bool:
        """Every key is compared, whichever fits: time tells nothing of them."""
        self._refresh()
        digest = _digest(key)
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(known, digest)
        return found

    def _refresh(self) -> None:
        stamp = stamp_of([self._path])
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._digests = _read(self._path)
        except ConfigError as exc:
            logger.warning("%s; the last %d keys stay in force", exc.message, len(self._digests))
            return
        logger.info("%d API keys from %s", len(self._digests), self._path)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _read(path: Path) -> Sequence[bytes]:
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"router.api_keys_file {path} cannot be read: {exc}", param="router.api_keys_file") from exc
    return [_digest(line) for line in lines if line and not line.startswith("#")]
