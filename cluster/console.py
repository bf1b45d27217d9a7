"""Where text goes: a rich console that is plain, and wide enough for tables, when it is not a terminal."""

from __future__ import annotations

import sys

from rich.console import Console

_PLAIN_WIDTH = 160


def make_console(*, stderr: bool = False) -> Console:
    """A console on stdout or stderr. No colours unless that is a terminal."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, highlight=False, width=None if stream.isatty() else _PLAIN_WIDTH)
