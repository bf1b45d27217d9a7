"""A child process that says how it is doing over a pipe, one JSON object per line.

It does not outlive this process, and is started again when it dies.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from cluster.processes import end, last_lines, spawn
from tandem.errors import ClusterError

_FIRST_BACKOFF_S = 0.2
_LONGEST_BACKOFF_S = 10.0
_STABLE_S = 30.0
"""A child that ran this long before it died starts again without delay."""


class ReportingChild:
    """One process at a time. `name` is how people call it; `log` takes its output, None shows it on stderr."""

    def __init__(self, name: str, *, log: Path | None) -> None:
        self._name = name
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: asyncio.StreamReader | None = None
        self._pipe: asyncio.ReadTransport | None = None

    @property
    def pid(self) -> int | None:
        """Its process, while it runs."""
        return None if self._process is None or self._process.poll() is not None else self._process.pid

    async def start(self, command: Sequence[str]) -> None:
        """Starts `command --ready-fd N`, which writes its lines to N. Call on a thread that lives on."""
        self._close_pipe()
        read_fd, write_fd = os.pipe()
        self._lines = reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        self._pipe, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_fd, "rb", 0)
        )
        try:
            self._spawn([*command, "--ready-fd", str(write_fd)], write_fd)
        finally:
            os.close(write_fd)

    def _spawn(self, command: Sequence[str], ready_fd: int) -> None:
        output = None if self._log is None else self._log.open("ab")
        try:
            self._process = spawn(command, output=output, death_signal=signal.SIGTERM, pass_fds=(ready_fd,))
        finally:
            if output is not None:
                output.close()

    async def line(self) -> dict[str, Any]:
        """The next line. Raises ClusterError with the child's last words when it ended."""
        assert self._lines is not None
        line = await self._lines.readline()
        if not line.endswith(b"\n"):
            raise ClusterError(self._why(await self._last_words()))
        values: dict[str, Any] = json.loads(line)
        return values

    def _why(self, last_words: str) -> str:
        """An error that the child itself reported, "tandem <name>: ...", says enough."""
        told = last_words.removeprefix(f"tandem {self._name}: ")
        return told if told != last_words else f"the {self._name} ended before it was ready: {last_words}"

    async def _last_words(self) -> str:
        status = await self.wait()
        logged = last_lines(self._log) if self._log is not None else ""
        return logged or f"exit status {status}"

    async def wait(self) -> int:
        """Returns the exit status when the process ends."""
        assert self._process is not None
        return await asyncio.to_thread(self._process.wait)

    async def supervise(self, restart: Callable[[], Awaitable[None]], note: Callable[[str], None]) -> None:
        """Calls `restart` whenever the child died, later and later; until cancelled. `note` is told of it."""
        loop = asyncio.get_running_loop()
        backoff_s = _FIRST_BACKOFF_S
        since = loop.time()
        while True:
            status = await self.wait()
            if loop.time() - since > _STABLE_S:
                backoff_s = _FIRST_BACKOFF_S
            note(f"the {self._name} died (status {status}); starting it again in {backoff_s:g} s")
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)
            since = loop.time()
            try:
                await restart()
                note(f"the {self._name} is back")
            except ClusterError as exc:
                note(exc.message)

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal, if it runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    async def stop(self, *, timeout_s: float) -> bool:
        """Terminates it; True when it ended by itself. Idempotent."""
        try:
            return self._process is None or await asyncio.to_thread(end, self._process, timeout_s=timeout_s)
        finally:
            self._close_pipe()

    def _close_pipe(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
