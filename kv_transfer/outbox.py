"""A link's book of unfinished sends: futures in order, a bound on how many are under way, and the counters."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

from kv_transfer.transport import LinkStats
from tandem.errors import LinkClosed, TransportError


class Outbox:
    """Futures of one link by sequence number. Thread-safe; every future ends exactly once.

    `busy_s` runs from the first unfinished send's `open` to the moment when none is left.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: dict[int, tuple[Future[None], int]] = {}
        self._next = 0
        self._closed: str | None = None
        self._num_bytes = 0
        self._num_messages = 0
        self._num_gathers = 0
        self._busy_s = 0.0
        self._busy_since = 0.0

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed is not None

    def open(self, num_bytes: int) -> tuple[int | None, Future[None]]:
        """A new send: its number and future. The number is None when the link is closed (the future has failed)."""
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            if self._closed is None:
                number, self._next = self._next, self._next + 1
                if not self._futures:
                    self._busy_since = time.monotonic()
                self._futures[number] = (future, num_bytes)
                return number, future
        future.set_exception(LinkClosed(self._closed))
        return None, future

    def finish(self, number: int, error: TransportError | None = None) -> bool:
        """Ends a send. False when it had ended already or never was."""
        with self._lock:
            entry = self._futures.pop(number, None)
            if entry is None:
                return False
            future, num_bytes = entry
            if error is None:
                self._num_bytes += num_bytes
                self._num_messages += 1
            if not self._futures:
                self._busy_s += time.monotonic() - self._busy_since
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
        return True

    def gathered(self) -> None:
        """A payload was copied together before it could be sent."""
        with self._lock:
            self._num_gathers += 1

    def close(self, reason: str) -> None:
        """Fails all unfinished sends, and all later ones, with LinkClosed. Idempotent: the first reason stays."""
        with self._lock:
            if self._closed is None:
                self._closed = reason
            numbers = list(self._futures)
        for number in numbers:
            self.finish(number, LinkClosed(reason))

    def stats(self) -> LinkStats:
        """Counters of finished sends, and the busy time so far."""
        with self._lock:
            running = time.monotonic() - self._busy_since if self._futures else 0.0
            return LinkStats(
                num_bytes=self._num_bytes,
                num_messages=self._num_messages,
                busy_s=self._busy_s + running,
                num_gathers=self._num_gathers,
            )
