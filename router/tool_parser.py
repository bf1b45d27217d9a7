"""Finds calls in an output as it comes, whatever its cuts: name first, then the arguments as their text arrives. Pure.

What is no call stays content: a block that cannot be read is given back as it was written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

from router.tools import CLOSE, OPEN

_HEAD = re.compile(r'\s*\[?\s*\{\s*"name"\s*:\s*"([\w.-]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_TAIL = re.compile(r"\s*\}\s*(,|\]?\s*</tool_call>)")


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCallDelta:
    """Part of a call. Id and name come with the first one; `arguments` is the next part of a JSON object's text."""

    index: int
    call_id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(kw_only=True, slots=True)
class Parsed:
    """What some text came to."""

    content: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)


def joined_calls(parts: Iterable[ToolCallDelta]) -> list[ToolCallDelta]:
    """The same with one part for each call."""
    calls: dict[int, ToolCallDelta] = {}
    for part in parts:
        known = calls.get(part.index)
        calls[part.index] = part if known is None else replace(known, arguments=known.arguments + part.arguments)
    return list(calls.values())


class _State(Enum):
    TEXT = auto()
    HEAD = auto()
    ARGUMENTS = auto()
    TAIL = auto()


class ToolCallParser:
    """One output. `new_id` makes a call's id."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._state = _State.TEXT
        self._held = ""
        self._num_calls = 0
        self._depth = 0
        self._in_string = self._escaped = False

    @property
    def has_calls(self) -> bool:
        """Whether a call was found."""
        return self._num_calls > 0

    def push(self, text: str) -> Parsed:
        """More text."""
        self._held += text
        parsed = Parsed()
        steps = {
            _State.TEXT: self._read_text,
            _State.HEAD: self._read_head,
            _State.ARGUMENTS: self._read_arguments,
            _State.TAIL: self._read_tail,
        }
        while steps[self._state](parsed):
            pass
        return Parsed(content=parsed.content, calls=joined_calls(parsed.calls))

    def flush(self) -> Parsed:
        """The output has ended. An unfinished block without a name is content."""
        held, self._held = self._held, ""
        if self._state is _State.HEAD:
            return Parsed(content=OPEN + held)
        return Parsed(content=held if self._state is _State.TEXT and not (self.has_calls and held.isspace()) else "")

    def _read_text(self, parsed: Parsed) -> bool:
        at = self._held.find(OPEN)
        if at >= 0:
            self._give_content(parsed, self._held[:at])
            self._held, self._state = self._held[at + len(OPEN) :], _State.HEAD
            return True
        num_held = next((n for n in range(len(OPEN) - 1, 0, -1) if self._held.endswith(OPEN[:n])), 0)
        certain = self._held[: len(self._held) - num_held]
        if self.has_calls and certain.isspace():
            return False  # between two calls, or more content: what follows will tell
        self._held = self._held[len(certain) :]
        self._give_content(parsed, certain)
        return False

    def _give_content(self, parsed: Parsed, text: str) -> None:
        parsed.content += "" if self.has_calls and text.isspace() else text

    def _read_head(self, parsed: Parsed) -> bool:
        if (head := _HEAD.match(self._held)) is not None:
            self._begin(parsed, head[1])
            self._held, self._state = self._held[head.end() :], _State.ARGUMENTS
            self._depth, self._in_string, self._escaped = 0, False, False
            return True
        at = self._held.find(CLOSE)
        if at < 0:
            return False
        block, self._held = self._held[:at], self._held[at + len(CLOSE) :]
        self._state = _State.TEXT
        calls = _whole_calls(block)
        if calls is None:
            parsed.content += OPEN + block + CLOSE
        for name, arguments in calls or ():
            self._begin(parsed, name)
            parsed.calls.append(ToolCallDelta(index=self._num_calls - 1, arguments=arguments))
        return True

    def _begin(self, parsed: Parsed, name: str) -> None:
        parsed.calls.append(ToolCallDelta(index=self._num_calls, call_id=self._new_id(), name=name))
        self._num_calls += 1

    def _read_arguments(self, parsed: Parsed) -> bool:
        end = self._end_of_value()
        text, self._held = self._held[:end], self._held[end:]
        if text:
            parsed.calls.append(ToolCallDelta(index=self._num_calls - 1, arguments=text))
        if self._depth or not text:
            return False
        self._state = _State.TAIL
        return True

    def _end_of_value(self) -> int:
        """Characters of the held text that are the object's."""
        for at, char in enumerate(self._held):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped, self._in_string = char == "\\", char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    return at + 1
        return len(self._held)

    def _read_tail(self, parsed: Parsed) -> bool:
        """After an object's arguments: another object, the block's end, or what nobody asked for."""
        tail = _TAIL.match(self._held)
        if tail is not None:
            self._held = self._held[tail.end() :]
            self._state = _State.HEAD if tail[1] == "," else _State.TEXT
            return True
        at = self._held.find(CLOSE)
        if at < 0:
            return False
        self._held, self._state = self._held[at + len(CLOSE) :], _State.TEXT
        return True


def _whole_calls(block: str) -> list[tuple[str, str]] | None:
    """Names and arguments of a complete block, in whatever order its keys are; None when it holds no calls."""
    try:
        value: Any = json.loads(block)
    except (ValueError, RecursionError):
        return None
    calls = []
    for each in value if isinstance(value, list) else [value]:
        if not isinstance(each, dict) or not isinstance(each.get("name"), str):
            return None
        arguments = each.get("arguments", each.get("parameters", {}))
        calls.append((each["name"], arguments if isinstance(arguments, str) else json.dumps(arguments)))
    return calls or None
