"""The one thread of a transport: an epoll loop over file descriptors, posted calls and an optional engine to drive.

It sleeps in epoll whenever there is nothing to do; nothing here polls on a timer while idle. It knows no protocol.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

logger = logging.getLogger(__name__)

_BUSY_TURNS = 200
_BUSY_SLEEP_S = 0.001
EVENTS_ERROR = select.EPOLLHUP | select.EPOLLERR


class Engine(Protocol):
    """Something that must be driven between events, such as a UCX worker."""

    def turn(self) -> bool:
        """Does what can be done now without waiting. True when something was done."""

    def arm(self) -> bool:
        """Asks for an event on a registered descriptor at the next change. False when there is already one."""

    def patience_s(self) -> float | None:
        """Longest sleep while armed; None for no bound."""


class ProgressThread:
    """Runs callbacks of file descriptors and posted calls on one daemon thread, in order of arrival.

    `register`, `modify` and `unregister` belong to the thread itself (or to before `start`). `post` may be called
    from anywhere. A callback that raises is logged and the loop goes on: one connection's trouble is not the others'.
    Under a real-time policy a poster steps aside once: on its core, a thread that it woke would wait until it sleeps.
    """

    def __init__(self, name: str, engine: Engine | None = None) -> None:
        self._engine = engine
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._stopping = False
        self._hands_over = os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR)
        self._idle_turns = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def is_current(self) -> bool:
        """Whether the caller runs on this thread."""
        return threading.current_thread() is self._thread

    def register(self, fd: int, events: int, handler: Callable[[int], None]) -> None:
        """Calls `handler(events)` whenever `fd` is ready."""
        self._epoll.register(fd, events)
        self._handlers[fd] = handler

    def modify(self, fd: int, events: int) -> None:
        """Changes the events that `fd` is watched for."""
        self._epoll.modify(fd, events)

    def unregister(self, fd: int) -> None:
        """Stops watching `fd`; must come before it is closed. Unknown ones are fine."""
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def post(self, call: Callable[[], None]) -> bool:
        """Runs `call` on the thread soon. False when the thread has been told to stop: `call` will not run."""
        with self._lock:
            if self._stopping:
                return False
            is_first = not self._calls
            self._calls.append(call)
            if is_first:  # the thread sleeps only when there are none, so earlier ones have woken it
                os.eventfd_write(self._wake_fd, 1)
        if is_first and self._hands_over:
            os.sched_yield()
        return True

    def run_and_wait(self, call: Callable[[], None], timeout_s: float) -> bool:
        """Like `post`, and waits until it ran; at once when called on the thread itself. False when it did not."""
        if self.is_current():
            call()
            return True
        done = threading.Event()

        def run() -> None:
            try:
                call()
            finally:
                done.set()

        return self.post(run) and done.wait(timeout_s)

    def stop(self) -> None:
        """Runs what was posted, then ends the thread and closes its descriptors. Idempotent; not from the thread."""
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
            os.eventfd_write(self._wake_fd, 1)
        self._thread.join()
        self._epoll.close()
        os.close(self._wake_fd)

    def _run(self) -> None:
        while True:
            self._run_calls()
            if self._stopping and not self._calls:
                return
            for fd, events in self._epoll.poll(self._sleep_s()):
                self._dispatch(fd, events)

    def _sleep_s(self) -> float | None:
        """How long epoll may sleep, after giving the engine its turn."""
        if self._engine is None:
            return None
        if self._engine.turn():
            self._idle_turns = 0
            return 0.0
        if self._engine.arm():
            self._idle_turns = 0
            return self._engine.patience_s()
        # Not armed: the engine says an event is pending. Should that stay so without progress, do not burn a core.
        self._idle_turns += 1
        return 0.0 if self._idle_turns < _BUSY_TURNS else _BUSY_SLEEP_S

    def _run_calls(self) -> None:
        while self._calls:
            self._guarded(self._calls.popleft())

    def _dispatch(self, fd: int, events: int) -> None:
        if fd == self._wake_fd:
            os.eventfd_read(self._wake_fd)
        elif (handler := self._handlers.get(fd)) is not None:
            self._guarded(lambda: handler(events))

    @staticmethod
    def _guarded(call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            logger.exception("a transport callback failed")
