"""The engine's thread: schedule, execute, commit, over and over. Decides nothing.

The scheduler is shared with other threads under `lock`; it is held to schedule and to commit, never while the model
runs. `wake()` after every change that may give the scheduler something to do.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

Plan = TypeVar("Plan")
Result = TypeVar("Result")


class Engine(Generic[Plan, Result]):
    """One daemon thread. `schedule` and `commit` are called under the lock, `execute` and `deliver` without it.

    `schedule` returns None when there is nothing to run. `commit` returns what `deliver` then tells the world. An
    exception in any of them is a bug of ours: it is logged, and `on_crash` is called once with it.
    """

    def __init__(
        self,
        name: str,
        *,
        schedule: Callable[[], Plan | None],
        execute: Callable[[Plan], Result],
        commit: Callable[[Plan, Result], Callable[[], None]],
        on_crash: Callable[[BaseException], None],
    ) -> None:
        self.lock = threading.Condition()
        self.num_iterations = 0
        self._schedule = schedule
        self._execute = execute
        self._commit = commit
        self._on_crash = on_crash
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Lets the thread look again. The caller must not hold the lock."""
        with self.lock:
            self.lock.notify()

    def stop(self) -> None:
        """Ends after the running iteration, and waits for it. Idempotent."""
        with self.lock:
            self._stopping = True
            self.lock.notify()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        try:
            while (plan := self._next_plan()) is not None:
                result = self._execute(plan)
                with self.lock:
                    deliver = self._commit(plan, result)
                self.num_iterations += 1
                deliver()
        except Exception as exc:
            logger.exception("the engine failed")
            self._on_crash(exc)

    def _next_plan(self) -> Plan | None:
        with self.lock:
            while not self._stopping:
                plan = self._schedule()
                if plan is not None:
                    return plan
                self.lock.wait()
        return None
