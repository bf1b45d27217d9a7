"""Runs something on a cluster until it is done or a signal ends it, and writes the ready file.

The first SIGINT or SIGTERM drains and stops everything; a second one kills it at once and exits with status 1.
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


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


async def with_cluster(
    launcher: Launcher[InfoT],
    body: Callable[[InfoT], Awaitable[T]],
    *,
    on_stop: Callable[[], None],
    on_force: Callable[[], None] = lambda: None,
) -> T | None:
    """Starts the cluster, runs `body`, stops the cluster. None when a signal ended it; `on_stop` is told of that first.

    `on_force` is the last thing before a forced exit.

    Raises what start, body or stop raise. Replaces the handlers of the stop signals while it runs.
    """

    async def whole() -> T:
        async with launcher as info:
            return await body(info)

    task = asyncio.create_task(whole())
    signalled = False

    def handle() -> None:
        nonlocal signalled
        if signalled:
            launcher.force_stop()
            on_force()
            os._exit(1)
        signalled = True
        on_stop()
        task.cancel()

    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, handle)
    try:
        return await task
    except asyncio.CancelledError:
        if not signalled:
            raise
        return None
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
    on_stop: Callable[[], None],
    until: Callable[[], Awaitable[object]] = _forever,
) -> None:
    """Keeps something up until a signal, or until `until` returns. The ready file exists exactly while it is up."""

    async def body(info: InfoT) -> None:
        with _present(ready_file, info.to_json()):
            await on_ready(info)
            await until()

    def take_away() -> None:
        if ready_file is not None:
            ready_file.unlink(missing_ok=True)

    await with_cluster(launcher, body, on_stop=on_stop, on_force=take_away)


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
