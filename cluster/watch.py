"""`tandem status --watch`: looks at the cluster until Ctrl-C, whatever happens to the router meanwhile."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

from cluster.access import Access
from cluster.client import Client
from cluster.console import make_console
from cluster.status_view import as_data
from cluster.watch_view import Look, line, render
from tandem.errors import TandemError


class Screen(Protocol):
    """Where looks are shown."""

    def showing(self) -> AbstractContextManager[object]:
        """Around the whole watch."""

    def look(self, before: Look | None, now: Look) -> None:
        """The router answered."""

    def absent(self, error: TandemError, last: Look | None) -> None:
        """It did not; `last` is what it said last."""


class LiveScreen:
    """Tables that are drawn over themselves."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")

    def showing(self) -> AbstractContextManager[object]:
        """See `Screen`."""
        return self._live

    def look(self, before: Look | None, now: Look) -> None:
        """See `Screen`."""
        self._live.update(render(before, now), refresh=True)

    def absent(self, error: TandemError, last: Look | None) -> None:
        """See `Screen`."""
        note = f"{error.message}; retrying"
        shown = Text(note, style="bold yellow") if last is None else render(None, last, note=note)
        self._live.update(shown, refresh=True)


class LineScreen:
    """A line for each look, with the time of day in front; JSON lines on demand."""

    def __init__(self, write: Callable[[str], None], *, as_json: bool = False) -> None:
        self._write = write
        self._as_json = as_json

    def showing(self) -> AbstractContextManager[object]:
        """See `Screen`."""
        return nullcontext()

    def look(self, before: Look | None, now: Look) -> None:
        """See `Screen`."""
        self._write(json.dumps(as_data(now.status)) if self._as_json else self._stamped(line(before, now)))

    def absent(self, error: TandemError, last: Look | None) -> None:
        """See `Screen`."""
        text = f"{error.message}; retrying"
        self._write(json.dumps({"error": text}) if self._as_json else self._stamped(text))

    def _stamped(self, text: str) -> str:
        return f"{time.strftime('%H:%M:%S')} {text}"


async def watch(access: Access | str, screen: Screen, *, interval_s: float) -> None:
    """Looks every `interval_s` seconds until cancelled."""
    last: Look | None = None
    async with Client(access) as client:
        while True:
            began_s = time.monotonic()
            try:
                status = await client.status(timeout_s=max(2.0, interval_s))
            except TandemError as error:
                screen.absent(error, last)
            else:
                now = Look(status=status, at_s=time.monotonic())
                screen.look(last, now)
                last = now
            await asyncio.sleep(max(0.0, began_s + interval_s - time.monotonic()))


def run_watch(access: Access | str, *, interval_s: float, as_json: bool) -> None:
    """Until Ctrl-C, which is the way to end it and no failure."""
    console = make_console()
    live = console.is_terminal and not as_json
    screen: Screen = LiveScreen(console) if live else LineScreen(_print_line, as_json=as_json)
    try:
        with screen.showing():
            asyncio.run(watch(access, screen, interval_s=interval_s))
    except KeyboardInterrupt:
        return


def _print_line(text: str) -> None:
    print(text, flush=True)
