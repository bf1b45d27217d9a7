"""A connection to a Ray that runs already, by address: no process of that Ray belongs to it, so none ends with it.

All calls go through one thread, each with a deadline, so that a Ray that hangs holds up nobody else.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from tandem.errors import ClusterError

T = TypeVar("T")
_log = logging.getLogger("tandem.ray")

CALL_TIMEOUT_S = 15.0
CONNECT_TIMEOUT_S = 60.0
_LAST_CHANCE_S = 5.0
"""For a call that had not returned when the connection was to be closed, and the closing."""


def _take_signals_back() -> None:
    """Ray's core sets handlers that print a stack trace at SIGTERM; this puts Python's own in front again."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.getsignal(number))
        signal.siginterrupt(number, False)


def _log_instead_of_print() -> None:
    """Ray prints its nodes' error events to stdout, whatever it was told; stdout is for answers, so they are logged.

    Ray has no setting for this. Where a later Ray has no such function, this changes nothing.
    """
    import ray._private.worker as ray_worker

    def log(data: Mapping[str, Any], ignore_prefix: bool) -> None:
        for line in data.get("lines", ()):
            _log.info("%s", line)

    ray_worker.print_to_stdstream = log


class _Thread:
    """Runs one call after another. As a daemon: a thread of an executor would be waited for when the process ends."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self.is_busy = False
        """Whether a call has not returned; false before its result is there."""
        threading.Thread(target=self._run, name="ray", daemon=True).start()

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """What comes of the call, once it is its turn. Cancelled before that, it is not made."""
        future: Future[T] = Future()
        self._calls.put((future, function))
        return future

    def end(self) -> None:
        """After the calls that wait."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function = call
            if not future.set_running_or_notify_cancel():
                continue
            self.is_busy = True
            try:
                result = function()
            except BaseException as exc:  # it is the caller's
                self.is_busy = False
                future.set_exception(exc)
            else:
                self.is_busy = False
                future.set_result(result)


class RayClient:
    """One driver of the Ray at `address`; `namespace` keeps the names of clusters apart."""

    def __init__(self, address: str, *, namespace: str, verbose: bool = False) -> None:
        self._address = address
        self._namespace = namespace
        self._verbose = verbose
        self._thread = _Thread()

    async def connect(self) -> None:
        """Raises ClusterError when no Ray answers there. The token, if any, is taken from RAY_AUTH_TOKEN."""
        try:
            await self.call(self._connect, timeout_s=CONNECT_TIMEOUT_S)
        finally:
            _take_signals_back()

    def _connect(self) -> None:
        import ray

        if not self._verbose:
            logging.getLogger("ray").setLevel(logging.ERROR)
            _log_instead_of_print()
        try:
            ray.init(
                address=self._address,
                namespace=self._namespace,
                configure_logging=False,
                log_to_driver=self._verbose,
            )
        except (RuntimeError, OSError, ValueError, ray.exceptions.RayError) as exc:
            raise ClusterError(f"no Ray can be used at {self._address}: {exc}") from exc

    async def call(self, function: Callable[[], T], *, timeout_s: float = CALL_TIMEOUT_S) -> T:
        """Runs `function` on Ray's thread. Raises ClusterError when it takes longer or Ray fails."""
        from ray.exceptions import RayError

        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.wrap_future(self._thread.submit(function))
        except TimeoutError as exc:
            raise ClusterError(f"Ray at {self._address} did not answer within {timeout_s:g} s") from exc
        except RayError as exc:
            raise ClusterError(f"Ray failed: {_first_line(exc)}") from exc

    async def close(self) -> bool:
        """Disconnects; workers go on. False when Ray hangs: then there is no parting from it in order."""
        import ray

        try:
            await self.call(ray.shutdown, timeout_s=_LAST_CHANCE_S if self._thread.is_busy else CALL_TIMEOUT_S)
        except ClusterError as exc:
            _log.warning("not disconnected: %s", exc.message)
            return False
        finally:
            self._thread.end()
        return True


def _first_line(exc: BaseException) -> str:
    return next(iter(str(exc).strip().splitlines()), type(exc).__name__)
