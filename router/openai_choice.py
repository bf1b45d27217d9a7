"""One choice as OpenAI clients expect it, in chunks or whole. Builds plain data; sends nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from router.openai_logprobs import CompletionLogprobs, Spell, chat_logprobs, joined, prompt_entries, prompt_logprobs
from router.output import OutputDelta
from router.tool_parser import ToolCallDelta
from tandem.types import TokenLogprobs

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptShown:
    """What of the prompt an answer shows."""

    token_ids: Sequence[int]
    echo: str | None = None
    """Its text, where it comes before the output's."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    wants_logprobs: bool = False
    """Whether `prompt_logprobs` is a field of the choice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceStyle:
    """What the client asked to see of each choice."""

    kind: Literal["chat", "text"]
    spell: Spell
    return_token_ids: bool
    num_logprobs: int | None


class ChoiceBody:
    """One choice, delta by delta."""

    def __init__(self, index: int, style: ChoiceStyle, prompt: PromptShown) -> None:
        self._index = index
        self._style = style
        self._prompt = prompt
        self._logprobs = CompletionLogprobs(style.spell, has_top=bool(style.num_logprobs))

    def opening(self) -> Json | None:
        """The choice of its first chunk: chat names the role, echo the prompt; None where there is nothing to say."""
        style, prompt = self._style, self._prompt
        extra = self._of_prompt()
        if style.kind == "chat":
            return self._choice({"delta": {"role": "assistant", "content": ""}}, None) | extra
        if not extra and prompt.echo is None:
            return None
        logprobs = self._echoed() if prompt.echo is not None else None
        token_ids: Json = {"token_ids": []} if style.return_token_ids else {}
        return self._choice({"text": prompt.echo or ""}, None, logprobs) | extra | token_ids

    def chunk(self, delta: OutputDelta) -> Json | None:
        """The choice of one further chunk; None where there is nothing to say."""
        has_tokens = bool(delta.token_ids) and (self._style.return_token_ids or bool(delta.logprobs))
        if not (delta.text or delta.tool_calls or delta.finish_reason or has_tokens):
            return None
        reason = delta.finish_reason.value if delta.finish_reason else None
        content: Json = {"text": delta.text}
        if self._style.kind == "chat":
            is_spoken = delta.text or not (reason or delta.tool_calls)
            calls = [_call_part(call) for call in delta.tool_calls]
            said = ({"content": delta.text} if is_spoken else {}) | ({"tool_calls": calls} if calls else {})
            content = {"delta": said}
        stopped: Json = {"stop_reason": delta.stop_reason} if reason else {}
        return self._choice(content, reason, self._of_output(delta)) | stopped | self._token_ids(delta)

    def whole(self, output: OutputDelta) -> Json:
        """The choice of an answer without streaming."""
        reason = output.finish_reason.value if output.finish_reason else None
        if self._style.kind == "text":
            content: Json = {"text": (self._prompt.echo or "") + output.text}
        else:
            content = {"message": _message(output)}
        parts = [self._echoed() if self._prompt.echo is not None else None, self._of_output(output)]
        present = [part for part in parts if part is not None]
        logprobs = joined(present) if len(present) > 1 else present[0] if present else None
        stopped: Json = {"stop_reason": output.stop_reason}
        return self._choice(content, reason, logprobs) | stopped | self._token_ids(output) | self._of_prompt()

    def _of_prompt(self) -> Json:
        shown: Json = {"prompt_token_ids": list(self._prompt.token_ids)} if self._style.return_token_ids else {}
        if self._prompt.wants_logprobs:
            entries = self._prompt.logprobs or ()
            shown["prompt_logprobs"] = prompt_logprobs(self._prompt.token_ids, entries, self._style.spell)
        return shown

    def _echoed(self) -> Json | None:
        if self._style.num_logprobs is None:
            return None
        return self._logprobs.part(self._prompt.token_ids, prompt_entries(self._prompt.logprobs or ()))

    def _of_output(self, output: OutputDelta) -> Json | None:
        if not output.logprobs:
            return None
        if self._style.kind == "chat":
            return chat_logprobs(output.token_ids, output.logprobs, self._style.spell)
        return self._logprobs.part(output.token_ids, output.logprobs)

    def _token_ids(self, output: OutputDelta) -> Json:
        return {"token_ids": list(output.token_ids)} if self._style.return_token_ids else {}

    def _choice(self, content: Json, finish_reason: str | None, logprobs: Json | None = None) -> Json:
        return {"index": self._index, **content, "logprobs": logprobs, "finish_reason": finish_reason}


def _message(output: OutputDelta) -> Json:
    message: Json = {"role": "assistant", "content": output.text, "refusal": None}
    calls = _whole_calls(output.tool_calls)
    return message | ({"content": output.text or None, "tool_calls": calls} if calls else {})


def _call_part(call: ToolCallDelta) -> Json:
    if not call.name:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.call_id, "type": "function", "function": function}


def _whole_calls(parts: Sequence[ToolCallDelta]) -> list[Json]:
    calls: list[Json] = []
    for part in parts:
        if part.name:
            calls.append({"id": part.call_id, "type": "function", "function": {"name": part.name, "arguments": ""}})
        calls[part.index]["function"]["arguments"] += part.arguments
    return calls
