"""Several answers streaming at once: side by side in panels on a terminal, in named lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from cluster.demo_prompts import DemoPrompt

_LINE_CHARS = 88
_PANEL_LINES = 4
_NAME_WIDTH = 8


class View(Protocol):
    """Is told the text of each answer as it comes."""

    def showing(self, prompts: Sequence[DemoPrompt]) -> AbstractContextManager[None]:
        """Around the whole stream."""

    def text(self, name: str, text: str) -> None:
        """More of one answer."""

    def ended(self, name: str) -> None:
        """No more of it comes."""


class SilentView:
    """Shows nothing."""

    @contextmanager
    def showing(self, prompts: Sequence[DemoPrompt]) -> Iterator[None]:
        """See `View`."""
        yield

    def text(self, name: str, text: str) -> None:
        """See `View`."""

    def ended(self, name: str) -> None:
        """See `View`."""


class LineView:
    """Whole lines, each with its answer's name in front."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._pending: dict[str, str] = {}

    @contextmanager
    def showing(self, prompts: Sequence[DemoPrompt]) -> Iterator[None]:
        """See `View`."""
        for prompt in prompts:
            self._print(prompt.name, f"> {prompt.shown}")
        yield

    def text(self, name: str, text: str) -> None:
        """See `View`."""
        *whole, rest = (self._pending.get(name, "") + text).split("\n")
        while len(rest) > _LINE_CHARS and " " in rest[:_LINE_CHARS]:
            cut = rest.rindex(" ", 0, _LINE_CHARS)
            whole.append(rest[:cut])
            rest = rest[cut + 1 :]
        for line in whole:
            self._print(name, line)
        self._pending[name] = rest

    def ended(self, name: str) -> None:
        """See `View`."""
        if rest := self._pending.pop(name, ""):
            self._print(name, rest)

    def _print(self, name: str, line: str) -> None:
        self._console.print(f"{name:<{_NAME_WIDTH}}| {line}", markup=False, soft_wrap=True)


class PanelView:
    """A panel for each answer; while they stream, the last lines of each, afterwards all of it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._prompts: Sequence[DemoPrompt] = ()
        self._texts: dict[str, str] = {}
        self._done: dict[str, float] = {}
        self._began_s = 0.0

    @contextmanager
    def showing(self, prompts: Sequence[DemoPrompt]) -> Iterator[None]:
        """See `View`."""
        self._prompts, self._began_s = prompts, time.monotonic()
        with Live(get_renderable=lambda: self._render(self._panel_lines()), console=self._console, transient=True):
            yield
        self._console.print(self._render(None))

    def text(self, name: str, text: str) -> None:
        """See `View`."""
        self._texts[name] = self._texts.get(name, "") + text

    def ended(self, name: str) -> None:
        """See `View`."""
        self._done[name] = time.monotonic() - self._began_s

    def _panel_lines(self) -> int:
        """Lines of each answer that fit on the screen, beside two of frame and one of question."""
        each = (self._console.height - 1) // max(1, len(self._prompts))
        return max(1, min(_PANEL_LINES, each - 3))

    def _render(self, max_lines: int | None) -> Group:
        return Group(*(self._panel(prompt, max_lines) for prompt in self._prompts))

    def _panel(self, prompt: DemoPrompt, max_lines: int | None) -> Panel:
        answer = Text(self._texts.get(prompt.name, "").strip("\n"))
        if max_lines is not None:
            lines = answer.wrap(self._console, max(20, self._console.width - 4))
            answer = Text("\n").join(lines[-max_lines:])
        elapsed_s = self._done.get(prompt.name) or time.monotonic() - self._began_s
        mark = f"{'✓' if prompt.name in self._done else '…'} {elapsed_s:.0f} s"
        question = Text(prompt.shown, style="dim", no_wrap=True, overflow="ellipsis")
        return Panel(Group(question, answer), title=f"{prompt.name} {mark}", title_align="left")
