"""A program on a terminal of its own: what it draws, and a signal at the moment when it has drawn something."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
from collections.abc import Sequence

DEADLINE_S = 60.0
HIDE_CURSOR = "\x1b[?25l"
SHOW_CURSOR = "\x1b[?25h"


class Terminal:
    """Runs `command` with all three streams on a pseudo-terminal; a context manager that leaves no process."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self.text = ""

    def __enter__(self) -> Terminal:
        self._master, slave = pty.openpty()
        try:
            self.process = subprocess.Popen(
                self._command, stdin=slave, stdout=slave, stderr=slave, env={**os.environ, "TERM": "xterm"}
            )
        finally:
            os.close(slave)
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.read_on()
        self.process.wait(timeout=DEADLINE_S)
        os.close(self._master)

    def read_on(self, until: str | None = None) -> None:
        """Reads until the text has been drawn; without one, until the program has ended."""
        while until is None or until not in self.text:
            try:
                data = os.read(self._master, 65536)
            except OSError:  # how a terminal says that nobody holds its other side
                break
            self.text += data.decode(errors="replace")
        assert until is None or until in self.text, self.text[-1000:]

    def interrupt(self, number: signal.Signals = signal.SIGINT) -> int:
        """Sends the signal, reads to the end and returns the exit status."""
        self.process.send_signal(number)
        self.read_on()
        return self.process.wait(timeout=DEADLINE_S)

    @property
    def shows_cursor(self) -> bool:
        """Whether the terminal was left with its cursor."""
        return self.text.rfind(SHOW_CURSOR) > self.text.rfind(HIDE_CURSOR)
