"""One choice's text: tokens through detokenizer, stop strings and the search for calls, and when it ends. No IO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.detokenizer import Detokenizer
from router.output import OutputDelta
from router.stop_strings import StopStrings
from router.tool_parser import Parsed, ToolCallParser
from tandem.types import FinishReason, TokenStep


@dataclass(frozen=True, kw_only=True, slots=True)
class StopRules:
    """Text that ends an output once `min_tokens` tokens are there; with `is_included` it is part of it."""

    texts: Sequence[str] = ()
    token_ids: Sequence[int] = ()
    """The client's own stop tokens: only to say which of them it was."""
    is_included: bool = False
    min_tokens: int = 0
    calls_are_plain: bool = False
    """An output of calls that ends by itself says `stop`, like any other, and not `tool_calls`."""


class ChoiceText:
    """Feeds on steps, gives deltas."""

    def __init__(
        self, choice: int, detokenizer: Detokenizer, stop: StopRules, tools: ToolCallParser | None = None
    ) -> None:
        """With `tools`, calls are looked for in the text."""
        self._choice = choice
        self._tools = tools
        self._detokenizer = detokenizer
        self._min_tokens = stop.min_tokens
        self._stop_token_ids = stop.token_ids
        self._calls_are_plain = stop.calls_are_plain
        self._stop = StopStrings(stop.texts, is_included=stop.is_included)
        self._num_tokens = 0

    @property
    def was_stopped(self) -> bool:
        """Whether a stop string ended it."""
        return self._stop.hit is not None

    @property
    def _has_calls(self) -> bool:
        return self._tools is not None and self._tools.has_calls

    def accept(self, step: TokenStep) -> OutputDelta:
        """One more token. The delta has the finish reason when the output ends here, also by a stop string."""
        finish_reason = step.finish_reason
        self._num_tokens += 1
        text = self._push(self._detokenizer.push(step.token_id))
        if finish_reason is not None and not self.was_stopped:
            text += self._push(self._detokenizer.flush())
        if self.was_stopped:
            finish_reason = FinishReason.STOP
        elif finish_reason is not None:
            text += self._stop.flush()
        parsed = self._parse(text, is_last=finish_reason is not None)
        stop_reason = self._stop_reason(step) if finish_reason is FinishReason.STOP else None
        if finish_reason is FinishReason.STOP and self._has_calls and not self._calls_are_plain:
            finish_reason = FinishReason.TOOL_CALLS
        return OutputDelta(
            choice=self._choice,
            text=parsed.content,
            tool_calls=tuple(parsed.calls),
            token_ids=(step.token_id,),
            logprobs=() if step.logprobs is None else (step.logprobs,),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )

    def _stop_reason(self, step: TokenStep) -> str | int | None:
        if self.was_stopped:
            return self._stop.hit
        return step.token_id if step.token_id in self._stop_token_ids else None

    def _parse(self, text: str, *, is_last: bool) -> Parsed:
        if self._tools is None:
            return Parsed(content=text)
        parsed = self._tools.push(text)
        if is_last:
            parsed.content += self._tools.flush().content
        return parsed

    def _push(self, text: str) -> str:
        """Text of the first `min_tokens` tokens is no part of a stop string."""
        return text if self._num_tokens <= self._min_tokens else self._stop.push(text)
