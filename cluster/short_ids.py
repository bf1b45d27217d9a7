"""Ray's ids of nodes, 56 hex digits, as people can read them: the first digits, as many as tell them apart. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

_LONG = re.compile(r"[0-9a-f]{32,}")
_FEWEST_DIGITS = 8


def short_ids(ids: Iterable[str]) -> dict[str, str]:
    """Each id and how it is shown among these; what is no long hex number is shown as it is."""
    every = set(ids)
    long = {each for each in every if _LONG.fullmatch(each)}
    digits = _FEWEST_DIGITS
    while len({each[:digits] for each in long}) < len(long):
        digits += 1
    return {each: each[:digits] if each in long else each for each in every}
