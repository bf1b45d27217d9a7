"""Runs something on a cluster until it is done or a signal ends it, and writes the ready file.

The first SIGINT or SIGTERM drains and stops everything, a second one kills it at once. A start that was ended by a
signal exits like a program that it killed: with 128 plus its number; a cluster that was up and has drained, with 0.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Protocol, TypeVar

from tandem.errors import ClusterError
from tandem.tasks import raise_if_cancelled

T = TypeVar("T")


class Info(Protocol):
    """What is known of something that runs."""

    def to_json(self) -> str:
        """One JSON object, for the ready file."""


InfoT = TypeVar("InfoT", bound=Info)
InfoT_co = TypeVar("InfoT_co", bound=Info, covariant=True)


class Launcher(Protocol[InfoT_co]):
    """Starts something when entered, stops it when left: a cluster, or a node of one."""

    async def __aenter__(self) -> InfoT_co:
        """Starts it."""

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stops it in order."""

    def force_stop(self) -> None:
        """Kills it at once."""


class StoppedBySignal(Exception):
    """A signal ended it, and all is stopped. `was_ready`: it was up by then."""

    def __init__(self, number: signal.Signals, *, was_ready: bool) -> None:
        super().__init__(f"stopped by {number.name}")
        self.was_ready = was_ready
        self.exit_status = 128 + number


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


async def with_cluster(
    launcher: Launcher[InfoT],
    body: Callable[[InfoT], Awaitable[T]],
    *,
    on_stop: Callable[[bool], None],
    on_force: Callable[[], None] = lambda: None,
) -> T:
    """Starts the cluster, runs `body`, stops the cluster.

    Raises StoppedBySignal when a signal ended it; `on_stop` is told of that first, and whether it was up by then;
    `on_force` is the last thing before a forced exit. Raises what start, body or stop raise. Replaces the handlers of
    the stop signals while it runs.
    """
    is_ready = False
    stopped: StoppedBySignal | None = None

    async def whole() -> T:
        nonlocal is_ready
        async with launcher as info:
            raise_if_cancelled()
            is_ready = True
            return await body(info)

    task = asyncio.create_task(whole())

    def handle(number: signal.Signals) -> None:
        nonlocal stopped
        if stopped is not None:
            launcher.force_stop()
            on_force()
            os._exit(128 + number)
        stopped = StoppedBySignal(number, was_ready=is_ready)
        on_stop(is_ready)
        task.cancel()

    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, handle, number)
    try:
        return await task
    except asyncio.CancelledError as exc:
        if stopped is None:
            raise
        raise stopped from exc
    finally:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)


async def _forever() -> None:
    await asyncio.Event().wait()


async def serve(
    launcher: Launcher[InfoT],
    *,
    ready_file: Path | None,
    on_ready: Callable[[InfoT], Awaitable[None]],
    on_stop: Callable[[bool], None],
    on_force: Callable[[], None] = lambda: None,
    until: Callable[[], Awaitable[object]] = _forever,
) -> None:
    """Keeps something up until a signal, or until `until` returns. The ready file exists exactly while it is up.

    Raises StoppedBySignal only when it was not up yet; what else `with_cluster` raises.
    """

    async def body(info: InfoT) -> None:
        with _present(ready_file, info.to_json()):
            await on_ready(info)
            await until()

    def take_away() -> None:
        if ready_file is not None:
            ready_file.unlink(missing_ok=True)
        on_force()

    try:
        await with_cluster(launcher, body, on_stop=on_stop, on_force=take_away)
    except StoppedBySignal as stopped:
        if not stopped.was_ready:
            raise


@contextmanager
def _present(path: Path | None, text: str) -> Iterator[None]:
    if path is None:
        yield
        return
    write_atomically(path, text)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """Writes a file that is either absent or complete. Raises ClusterError when it cannot be written."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_text(text)
        scratch.replace(path)
    except OSError as exc:
        raise ClusterError(f"the ready file {path} cannot be written: {exc.strerror}") from exc
