"""Waiting for what a cluster does in its own time."""

from __future__ import annotations

import time
from collections.abc import Callable

TIMEOUT_S = 60.0
LOOK_S = 0.05


def until(
    holds: Callable[[], bool],
    *,
    timeout_s: float = TIMEOUT_S,
    what: Callable[[], object] | None = None,
    look_s: float = LOOK_S,
) -> None:
    """Returns as soon as `holds()`, asked every `look_s`; fails when it does not in time, and shows `what()`."""
    give_up = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < give_up, f"not within {timeout_s:g} s; {what() if what else ''}"
        time.sleep(look_s)
