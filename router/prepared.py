"""A request that was checked and tokenized and has its place, but is not sent to workers yet.

It is started once or dropped once; whoever prepared it must see to that.
"""

from __future__ import annotations

from collections.abc import Callable

from router.stream import OutputStream
from tandem.types import Request


class PreparedRequest:
    """Made by `Frontend.prepare`."""

    def __init__(
        self, request: Request, *, start: Callable[[], OutputStream], drop: Callable[[], None]
    ) -> None:
        self.request = request
        self._start = start
        self._drop = drop
        self._is_settled = False

    def start(self) -> OutputStream:
        """Sends it to workers. The caller must close the stream it gets. Raises TandemError; it is over then, too."""
        assert not self._is_settled, "started or dropped before"
        self._is_settled = True
        return self._start()

    def drop(self) -> None:
        """Gives its place back, unless it was started. Idempotent."""
        if not self._is_settled:
            self._is_settled = True
            self._drop()
