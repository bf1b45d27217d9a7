"""One request between its two legs: the order of tokens, when it is complete, and what a leg's end means. Pure.

Events come from both legs in any order; tokens leave in output order exactly once. After completion or failure
nothing is emitted any more. `dispatcher.py` carries out the actions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tandem.errors import TandemError, WorkerUnavailable
from tandem.types import TokenStep

Leg = Literal["prefill", "decode"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenPrefill:
    """The decode leg is known to its worker (or there is none): the prefill leg may be opened."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Emit:
    """The next output token."""

    step: TokenStep


@dataclass(frozen=True, kw_only=True, slots=True)
class StopChoice:
    """The decode worker need not go on with this choice; with others it must."""

    choice: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Fail:
    """The request ends with an error, which came from `leg` (None: from neither); both legs must be closed."""

    error: TandemError
    leg: Leg | None = None


Action = OpenPrefill | Emit | Fail | StopChoice


class RequestLifecycle:
    """`has_decode` is False for requests that end with their first token by max_tokens."""

    def __init__(self, *, has_decode: bool, num_choices: int = 1) -> None:
        self._waiting: dict[tuple[int, int], TokenStep] = {}
        """By choice and position."""
        self._next_positions = [0] * num_choices
        self._running = set(range(num_choices))
        self._open: set[Leg] = {"prefill", "decode"} if has_decode else {"prefill"}
        self._has_decode = has_decode
        self._prefill_opened = False
        self.complete = False
        """The last token of every choice has been emitted."""
        self.failed = False

    @property
    def is_over(self) -> bool:
        """Nothing will be emitted any more."""
        return self.complete or self.failed

    def start(self) -> list[Action]:
        """The request was routed."""
        return [] if self._has_decode else self._open_prefill()

    def accepted(self) -> list[Action]:
        """The decode worker knows the leg."""
        return self._open_prefill()

    def token(self, step: TokenStep) -> list[Action]:
        """A token came from either leg. Repeated positions, and what comes after a choice's end, are dropped."""
        choice = step.choice
        if self.is_over or choice not in self._running or step.position < self._next_positions[choice]:
            return []
        self._waiting.setdefault((choice, step.position), step)
        actions: list[Action] = []
        while choice in self._running and (choice, self._next_positions[choice]) in self._waiting:
            step = self._waiting.pop((choice, self._next_positions[choice]))
            self._next_positions[choice] += 1
            actions.append(Emit(step=step))
            if step.finish_reason is not None:
                self._end(choice)
        return actions

    def stop(self, choice: int) -> list[Action]:
        """The front wants no more of a choice (its text holds a stop string). Nothing of it is emitted any more."""
        if self.is_over or choice not in self._running:
            return []
        self._end(choice)
        return [StopChoice(choice=choice)] if self._has_decode and not self.complete else []

    def _end(self, choice: int) -> None:
        self._running.discard(choice)
        self._waiting = {key: step for key, step in self._waiting.items() if key[0] != choice}
        self.complete = not self._running

    def leg_done(self, leg: Leg) -> list[Action]:
        """A leg ended as it should."""
        self._open.discard(leg)
        if self._open or self.is_over:
            return []
        return self._fail(WorkerUnavailable("both legs ended before the output was complete"))

    def leg_failed(self, leg: Leg, error: TandemError) -> list[Action]:
        """A leg ended with an error. Once the output is complete this is no failure of the request."""
        self._open.discard(leg)
        return [] if self.is_over else self._fail(error, leg)

    def _open_prefill(self) -> list[Action]:
        if self.is_over or self._prefill_opened:
            return []
        self._prefill_opened = True
        return [OpenPrefill()]

    def _fail(self, error: TandemError, leg: Leg | None = None) -> list[Action]:
        self.failed = True
        return [Fail(error=error, leg=leg)]

    def check_invariants(self) -> None:
        """Asserts what must hold after each event."""
        assert not (self.complete and self.failed)
        assert self.complete == (not self._running)
        for choice, position in self._waiting:
            assert choice in self._running
            assert position > self._next_positions[choice] or self.is_over
