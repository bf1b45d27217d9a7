"""Stop strings over streamed text, pure: holds back what may be the beginning of one, cuts where one is complete."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """The stop strings of one output. Text that `push` returned is certain never to be part of a stop string."""

    def __init__(self, stops: Sequence[str], *, is_included: bool = False) -> None:
        self._stops = tuple(stops)
        self._is_included = is_included
        self._held = ""
        self.hit: str | None = None

    def push(self, text: str) -> str:
        """The text that may be shown now. After a hit (`hit` is set) it is the last one.

        It is cut before the stop text, or after it where that is included.
        """
        if not self._stops:
            return text
        text = self._held + text
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, self.hit = min(found)
            self._held = ""
            return text[: at + len(self.hit)] if self._is_included else text[:at]
        num_held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """What is held back when the output ends otherwise."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
