"""One request between its two legs: the order of tokens, when it is complete, and what a leg's end means. Pure.

Events come from both legs in any order; tokens leave in output order exactly once. After completion or failure
nothing is emitted any more. `dispatcher.py` carries out the actions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tandem.errors import TandemError, WorkerUnavailable
from tandem.types import FinishReason, TokenStep

Leg = Literal["prefill", "decode"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenPrefill:
    """The decode leg is known to its worker (or there is none): the prefill leg may be opened."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Emit:
    """The next output token."""

    step: TokenStep


@dataclass(frozen=True, kw_only=True, slots=True)
class Fail:
    """The request ends with an error, which came from `leg` (None: from neither); both legs must be closed."""

    error: TandemError
    leg: Leg | None = None


Action = OpenPrefill | Emit | Fail


class RequestLifecycle:
    """`has_decode` is False for requests that end with their first token by max_tokens."""

    def __init__(self, *, has_decode: bool) -> None:
        self._waiting: dict[int, TokenStep] = {}
        self._next_position = 0
        self._open: set[Leg] = {"prefill", "decode"} if has_decode else {"prefill"}
        self._has_decode = has_decode
        self._prefill_opened = False
        self.complete = False
        """The last token has been emitted."""
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

    def token(self, position: int, token_id: int, finish_reason: FinishReason | None) -> list[Action]:
        """A token came from either leg. Repeated positions are dropped."""
        if self.is_over or position < self._next_position:
            return []
        step = TokenStep(position=position, token_id=token_id, finish_reason=finish_reason)
        self._waiting.setdefault(position, step)
        actions: list[Action] = []
        while not self.complete and self._next_position in self._waiting:
            step = self._waiting.pop(self._next_position)
            self._next_position += 1
            self.complete = step.finish_reason is not None
            actions.append(Emit(step=step))
        return actions

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
        assert all(position > self._next_position or self.is_over for position in self._waiting)
