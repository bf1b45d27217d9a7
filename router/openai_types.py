"""The bodies that OpenAI clients send, checked: strict types, bounds elsewhere (router/validation.py).

A field is served, harmless (accepted, without effect), or refused by name; nothing is silently ignored.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Never, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from router.openai_messages import served_messages
from router.prompt import Prompt
from router.validation import SamplingOptions
from tandem.errors import InvalidRequest

MAX_BATCH_PROMPTS = 256

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "echo": (None, False),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_p": (None, 0),
    "min_tokens": (None, 0),
    "suffix": (None, ""),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "verbosity": (None,),
    "web_search_options": (None,),
    "prompt_logprobs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "skip_special_tokens": (None, True),
    "length_penalty": (None, 1),
    "use_beam_search": (None, False),
}
"""Fields that do not work yet, with the values that ask for nothing."""

_HARMLESS = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})


DEFAULT_COMPLETION_TOKENS = 16


class StreamOptions(BaseModel):
    """`include_obfuscation` pads OpenAI's own streams; here it has nothing to act on."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool = False
    include_obfuscation: bool | None = None


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    model: str = ""
    """Empty takes the only model served."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    request_id: str | None = None
    timeout_s: float | None = None
    return_token_ids: bool | None = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream=true", param="stream_options")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    def options(self) -> SamplingOptions:
        """The sampling fields; `stop` as a tuple."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingOptions(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            max_tokens=self.max_tokens,
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
        )


class CompletionBody(_Body):
    """POST /v1/completions."""

    prompt: str | list[Any]

    def options(self) -> SamplingOptions:
        """As OpenAI's completions, 16 tokens where `max_tokens` is left out."""
        options = super().options()
        return options if options.max_tokens is not None else replace(options, max_tokens=DEFAULT_COMPLETION_TOKENS)

    def prompts(self) -> list[Prompt]:
        """One or more prompts. Raises InvalidRequest for anything but the four forms."""
        if isinstance(self.prompt, str) or _all_ints(self.prompt):
            return [self.prompt]
        if len(self.prompt) > MAX_BATCH_PROMPTS:
            raise InvalidRequest(
                f"prompt must be at most {MAX_BATCH_PROMPTS} prompts, got {len(self.prompt)}", param="prompt"
            )
        if all(isinstance(item, str) for item in self.prompt):
            return list(self.prompt)
        if all(isinstance(item, list) and _all_ints(item) for item in self.prompt):
            return list(self.prompt)
        raise InvalidRequest(
            "prompt must be a string, a list of token ids, a list of strings or a list of lists of token ids",
            param="prompt",
        )


class TextPart(BaseModel):
    """One part of a message's content; only text."""

    model_config = ConfigDict(strict=True, extra="forbid")

    type: str
    text: str


class Message(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(strict=True, extra="forbid")

    role: str
    content: str | list[TextPart]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """Role and joined text."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": content}


class ChatBody(_Body):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_served_messages(cls, values: dict[str, Any]) -> dict[str, Any]:
        messages = values.get("messages")
        return {**values, "messages": served_messages(messages)} if isinstance(messages, list) else values

    def options(self) -> SamplingOptions:
        """`max_completion_tokens` wins over its older name `max_tokens`."""
        options = super().options()
        if self.max_completion_tokens is None:
            return options
        return replace(options, max_tokens=self.max_completion_tokens, max_tokens_field="max_completion_tokens")


BodyT = TypeVar("BodyT", bound=_Body)


def parse_body(raw: bytes, kind: type[BodyT]) -> BodyT:
    """A checked body. Raises InvalidRequest for malformed JSON or UTF-8, wrong types, unknown and unserved fields."""
    values = _parse_json(raw)
    if not isinstance(values, dict):
        raise InvalidRequest(f"the body must be a JSON object, got a {type(values).__name__}")
    served = {}
    for name, value in values.items():
        if name in kind.model_fields:
            served[name] = value
        elif name not in _HARMLESS:
            _refuse_unless_neutral(name, value)
    try:
        return kind.model_validate(served)
    except ValidationError as exc:
        raise _first_error(exc) from exc


def _refuse_unless_neutral(name: str, value: Any) -> None:
    if name not in _NEUTRAL:
        raise InvalidRequest(f"unknown field {name!r}", param=name)
    if not any(value == neutral and type(value) in (type(neutral), float) for neutral in _NEUTRAL[name]):
        raise InvalidRequest(f"{name} is not supported yet", param=name)


def _parse_json(raw: bytes) -> Any:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise InvalidRequest(f"the body is not valid UTF-8: {exc.reason} at byte {exc.start}") from exc
    try:
        values = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as exc:
        raise InvalidRequest(f"the body is not valid JSON: {exc}") from exc
    if "\\ud" in text.lower():
        _refuse_surrogates(values)
    return values


def _no_constant(name: str) -> Never:
    raise ValueError(f"{name} is not a JSON number")


def _refuse_surrogates(values: Any) -> None:
    try:
        json.dumps(values, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as exc:
        raise InvalidRequest("the body holds a \\ud8xx escape without its other half: no Unicode character") from exc


def _first_error(error: ValidationError) -> InvalidRequest:
    """The first wrong field; of a union's several complaints about it, the one that got furthest."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    about = [each for each in errors if each["loc"][:1] == errors[0]["loc"][:1]]
    deepest = max(about, key=lambda each: len(each["loc"]))
    param = _dotted([part for part in deepest["loc"] if not _is_union_branch(part)])
    return InvalidRequest(f"{param}: {deepest['msg']}", param=param)


def _is_union_branch(part: str | int) -> bool:
    """pydantic names the tried member of a union in the path; no field has such a name."""
    return isinstance(part, str) and (part in ("str", "int") or "[" in part)


def _dotted(path: Sequence[str | int]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def _all_ints(items: Sequence[Any]) -> bool:
    return all(type(item) is int for item in items)
