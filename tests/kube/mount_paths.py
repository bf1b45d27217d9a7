"""Where a container's mounts really are. Containers share this machine's file system, so paths are written anew.

A mount path is replaced by the volume's real directory wherever it stands as a path: in commands, in values of the
environment, and in the text of ConfigMaps and Secrets. Programs that know such a path only from their own code do not
find it, but for /tmp, which $TMPDIR names, and /dev/shm, which is this machine's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

SHARED_PLACES = ("/dev/shm",)


class MountPaths:
    """Translates paths of a container into paths of this machine."""

    def __init__(self, real: Mapping[str, Path]) -> None:
        self._real = {place.rstrip("/"): str(path) for place, path in real.items() if place not in SHARED_PLACES}
        longest_first = sorted(self._real, key=len, reverse=True)
        places = "|".join(re.escape(place) for place in longest_first)
        self._pattern = re.compile(rf"(?<![\w./-])(?:{places})(?![\w.-])") if places else None

    def translate(self, text: str) -> str:
        """A text with every mount path in it replaced."""
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda match: self._real[match[0]], text)

    def translate_bytes(self, content: bytes) -> bytes:
        """The same for a file; what is not text stays as it is."""
        try:
            return self.translate(content.decode()).encode()
        except UnicodeDecodeError:
            return content
