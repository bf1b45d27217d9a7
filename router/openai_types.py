"""The bodies that OpenAI clients send, checked: strict types, bounds elsewhere (router/validation.py).

A field is served, harmless (accepted, without effect), or refused by name; nothing is silently ignored.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, Never, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from router.openai_chat import Message, NamedTool, ToolBody, tool_use
from router.openai_forms import ResponseFormat, StructuredOutputs
from router.openai_messages import served_messages
from router.prompt import Conversation, Prompt
from router.template_use import TemplateUse, told_variables
from router.validation import SamplingOptions
from tandem.errors import InvalidRequest
from tandem.types import MAX_CHOICES, Grammar

MAX_BATCH_PROMPTS = 256
MAX_OUTPUTS = 4096
"""Most outputs of one HTTP request: its prompts times `n`."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "echo": (None, False),
    "suffix": (None, ""),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "verbosity": (None,),
    "web_search_options": (None,),
    "skip_special_tokens": (None, True),
    "add_special_tokens": (None,),
    "documents": (None, []),
    "chat_template": (None,),
    "length_penalty": (None, 1),
    "use_beam_search": (None, False),
}
"""Fields that are not served, with the values that ask for nothing."""

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
    include_stop_str_in_output: bool | None = None
    cache_salt: str | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    prompt_logprobs: int | None = None
    n: int | None = None
    priority: int | None = None
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
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
        grammar_field, grammar = self._grammar()
        return SamplingOptions(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            max_tokens=self.max_tokens,
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            cache_salt=self.cache_salt or "",
            min_tokens=self.min_tokens,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=tuple((_token_id(key), bias) for key, bias in (self.logit_bias or {}).items()),
            prompt_logprobs=self.prompt_logprobs,
            n=self.n,
            priority=self.priority,
            grammar=grammar,
            grammar_field=grammar_field,
        )

    def _grammar(self) -> tuple[str, Grammar | None]:
        """What the output must match, and which field says so. Raises InvalidRequest when two do."""
        asked: list[tuple[str, Grammar]] = []
        if self.response_format is not None and (by_format := self.response_format.grammar()) is not None:
            asked.append(by_format)
        guided = StructuredOutputs(
            json=self.guided_json, regex=self.guided_regex, choice=self.guided_choice, grammar=self.guided_grammar
        )
        asked += guided.grammars("guided_")
        if self.structured_outputs is not None:
            asked += self.structured_outputs.grammars("structured_outputs.")
        if len(asked) > 1:
            first, second = asked[0][0], asked[1][0]
            raise InvalidRequest(f"{second} does not go with {first}: give one of them", param=second)
        return asked[0] if asked else ("grammar", None)


class CompletionBody(_Body):
    """POST /v1/completions."""

    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None

    def options(self) -> SamplingOptions:
        """As OpenAI's completions, 16 tokens where `max_tokens` is left out; with echo the prompt is scored too."""
        if self.best_of not in (None, self.n or 1):
            raise InvalidRequest(
                "best_of is not supported: ask for n outputs with logprobs, and choose the best yourself",
                param="best_of",
            )
        options = replace(super().options(), logprobs=self.logprobs)
        if self.echo and options.prompt_logprobs is None:
            options = replace(options, prompt_logprobs=self.logprobs)
        return options if options.max_tokens is not None else replace(options, max_tokens=DEFAULT_COMPLETION_TOKENS)

    def prompts(self) -> list[Prompt]:
        """One or more prompts. Raises InvalidRequest for anything but the four forms."""
        if isinstance(self.prompt, str) or _all_ints(self.prompt):
            return [self.prompt]
        if len(self.prompt) > MAX_BATCH_PROMPTS:
            raise InvalidRequest(
                f"prompt must be at most {MAX_BATCH_PROMPTS} prompts, got {len(self.prompt)}", param="prompt"
            )
        num_prompts = len(self.prompt)
        if num_prompts * (self.n or 1) > MAX_OUTPUTS:
            most = min(MAX_CHOICES, MAX_OUTPUTS // num_prompts)
            raise InvalidRequest(
                f"n must be at most {most} with {num_prompts} prompts, as one request gives {MAX_OUTPUTS} at most; "
                f"got {self.n}",
                param="n",
            )
        if all(isinstance(item, str) for item in self.prompt):
            return list(self.prompt)
        if all(isinstance(item, list) and _all_ints(item) for item in self.prompt):
            return list(self.prompt)
        raise InvalidRequest(
            "prompt must be a string, a list of token ids, a list of strings or a list of lists of token ids",
            param="prompt",
        )


class ChatBody(_Body):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[ToolBody] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_served_messages(cls, values: dict[str, Any]) -> dict[str, Any]:
        messages = values.get("messages")
        return {**values, "messages": served_messages(messages)} if isinstance(messages, list) else values

    def prompts(self) -> list[Prompt]:
        """The one conversation: messages and tools. Raises InvalidRequest."""
        use = tool_use(self.tools or (), self.tool_choice, parallel=self.parallel_tool_calls is not False)
        messages = tuple(message.plain(f"messages[{i}]") for i, message in enumerate(self.messages))
        return [Conversation(messages=messages, tools=use, template=self._template())]

    def _template(self) -> TemplateUse:
        variables = told_variables(self.chat_template_kwargs, self.reasoning_effort)
        continues = bool(self.continue_final_message)
        if continues and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message goes on with the last message, add_generation_prompt begins another: give one",
                param="continue_final_message",
            )
        begins = not continues if self.add_generation_prompt is None else self.add_generation_prompt
        return TemplateUse(begins_answer=begins, continues_last=continues, variables=variables)

    def options(self) -> SamplingOptions:
        """`max_completion_tokens` and its older name `max_tokens` may not contradict each other."""
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs=true", param="top_logprobs")
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        options = replace(super().options(), logprobs=logprobs, logprobs_field="top_logprobs")
        if self.max_completion_tokens is None:
            return options
        if self.max_tokens not in (None, self.max_completion_tokens):
            raise InvalidRequest(
                f"max_completion_tokens={self.max_completion_tokens} contradicts its older name "
                f"max_tokens={self.max_tokens}: give one of them",
                param="max_completion_tokens",
            )
        return replace(options, max_tokens=self.max_completion_tokens, max_tokens_field="max_completion_tokens")


_JSON_WORDS: dict[type, str] = {
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "an array",
}
BodyT = TypeVar("BodyT", bound=BaseModel)


def parse_body(raw: bytes, kind: type[BodyT]) -> BodyT:
    """A checked body. Raises InvalidRequest for malformed JSON or UTF-8, wrong types, unknown and unserved fields."""
    values = _parse_json(raw)
    if not isinstance(values, dict):
        raise InvalidRequest(f"the body must be a JSON object, got {_JSON_WORDS[type(values)]}")
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


def _token_id(text: str) -> int:
    """A key of logit_bias: JSON objects have no other keys than strings."""
    if not text.isdecimal():
        raise InvalidRequest(f"logit_bias: a key must be a token id, got {text!r:.40}", param="logit_bias")
    return int(text)


def _refuse_unless_neutral(name: str, value: Any) -> None:
    if name not in _NEUTRAL:
        raise InvalidRequest(f"unknown field {name!r}", param=name)
    if not any(value == neutral and type(value) in (type(neutral), float) for neutral in _NEUTRAL[name]):
        raise InvalidRequest(f"{name} is not supported", param=name)


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
    return isinstance(part, str) and (part in ("str", "int", NamedTool.__name__) or "[" in part)


def _dotted(path: Sequence[str | int]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def _all_ints(items: Sequence[Any]) -> bool:
    return all(type(item) is int for item in items)
