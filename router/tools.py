"""Tools that a model may call: what the client said of them, how a model is told, and what holds it to them. Pure.

A call is text in the output, in one of two formats: JSON objects (as the Hermes and Qwen families write them), or lists
of such objects (as SmolLM2 does), each between <tool_call> and </tool_call>.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from router.json_schema import check_object_schema
from tandem.errors import InvalidRequest
from tandem.types import Grammar, GrammarKind

MAX_TOOLS = 128
MAX_REQUIRED_CALLS = 16
"""Most calls of an output that has to call: a model that is kept from ending by itself might repeat one for ever."""
OPEN, CLOSE = "<tool_call>", "</tool_call>"
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_WORDS = ("none", "auto", "required")


class ToolFormat(StrEnum):
    """How a model writes its calls."""

    OBJECT = "object"
    LIST = "list"

    def around(self, name: str) -> tuple[str, str]:
        """What comes before and after the arguments of a call of `name`."""
        head = f'{{"name": {json.dumps(name)}, "arguments": '
        if self is ToolFormat.LIST:
            return f"{OPEN}[{head}", f"}}]{CLOSE}"
        return f"{OPEN}\n{head}", f"}}\n{CLOSE}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """A function. `parameters` is the JSON Schema of its arguments; None allows any object."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    def as_openai(self) -> dict[str, Any]:
        """As chat templates know it."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters or {"type": "object", "properties": {}}),
        }
        return {"type": "function", "function": function}


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolUse:
    """`choice` is "auto", "none", "required" or a tool's name."""

    tools: tuple[Tool, ...] = ()
    choice: str = "auto"
    parallel: bool = True

    @property
    def offered(self) -> tuple[Tool, ...]:
        """What the model is told of."""
        return () if self.choice == "none" else self.tools

    @property
    def must_call(self) -> bool:
        """Whether the output has to be a call."""
        return bool(self.tools) and self.choice not in ("none", "auto")


    @property
    def is_named(self) -> bool:
        """Whether the output has to be one call of one tool."""
        return self.must_call and self.choice != "required"


NO_TOOLS = ToolUse()


def check_tools(use: ToolUse) -> None:
    """Raises InvalidRequest that names the field."""
    if len(use.tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools must be at most {MAX_TOOLS}, got {len(use.tools)}", param="tools")
    names = [tool.name for tool in use.tools]
    for i, tool in enumerate(use.tools):
        if not _NAME.fullmatch(tool.name) or tool.name in _WORDS:
            raise InvalidRequest(
                f"tools[{i}]: a name is letters, digits, _, - and ., none of {', '.join(_WORDS)}; got {tool.name!r}",
                param=f"tools[{i}].name",
            )
        if tool.parameters is not None and (tool.strict or use.choice in ("required", tool.name)):
            check_object_schema(_as_object(tool.parameters), param=f"tools[{i}].parameters")
    if len(set(names)) < len(names):
        raise InvalidRequest("tools: two have the same name", param="tools")
    if use.choice == "required" and not names:
        raise InvalidRequest("tool_choice is required, but there are no tools", param="tool_choice")
    if use.choice not in (*_WORDS, *names):
        raise InvalidRequest(f"tool_choice names {use.choice!r}, which is none of the tools", param="tool_choice")


def _as_object(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The schema, with its type where it is left out because there can be only one."""
    says_what = {"type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"}
    return dict(parameters) if parameters.keys() & says_what else {"type": "object", **parameters}


def tool_grammar(use: ToolUse, output: ToolFormat) -> Grammar | None:
    """What holds the output to the tools; None where the model is free.

    Free to call or not, it is held to a call's form once it begins one, if any tool is strict or only one call is
    allowed. A named tool is called once, as with OpenAI; with "required" there is at least one call, and not more than
    MAX_REQUIRED_CALLS.
    """
    if not use.offered or not (use.must_call or not use.parallel or any(tool.strict for tool in use.tools)):
        return None
    named = [tool for tool in use.tools if tool.name == use.choice]
    tags = [_tag(tool, output, held=use.must_call or tool.strict) for tool in named or use.tools]
    if use.must_call:
        rules = _calls(tags, at_most=1 if named or not use.parallel else MAX_REQUIRED_CALLS)
    else:
        rules = {"type": "triggered_tags", "tags": tags, "triggers": [OPEN], "stop_after_first": not use.parallel}
    text = json.dumps({"type": "structural_tag", "format": rules})
    return Grammar(kind=GrammarKind.STRUCTURAL_TAG, text=text)


def _calls(tags: Sequence[Mapping[str, Any]], *, at_most: int) -> dict[str, Any]:
    """Calls, each on a line of its own, and nothing else."""
    one = {"type": "or", "elements": tags}
    further = {"type": "sequence", "elements": [{"type": "const_string", "value": "\n"}, one]}
    more = [{"type": "repeat", "min": 0, "max": at_most - 1, "content": further}] if at_most > 1 else []
    return {"type": "sequence", "elements": [one, *more]}


def _tag(tool: Tool, output: ToolFormat, *, held: bool) -> dict[str, Any]:
    begin, end = output.around(tool.name)
    schema = _as_object(tool.parameters) if held and tool.parameters is not None else {"type": "object"}
    return {"type": "tag", "begin": begin, "content": {"type": "json_schema", "json_schema": schema}, "end": end}


def told_as_text(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], output: ToolFormat
) -> list[dict[str, Any]]:
    """The conversation for a chat template that knows no tools: as system and user text and the model's own calls."""
    plain = [_as_text(message, output) for message in messages]
    if not tools:
        return plain
    begin, end = output.around("NAME")
    listed = "\n".join(json.dumps(tool.as_openai(), ensure_ascii=False) for tool in tools)
    told = (
        f"You can call functions. Those you have are described by JSON Schemas:\n<tools>\n{listed}\n</tools>\n"
        f"To call one, answer with its name and its arguments in this form, once for each call:\n{begin}{{...}}{end}\n"
        "If none of them helps, answer without a call."
    )
    if plain and plain[0]["role"] == "system":
        return [{"role": "system", "content": f"{plain[0]['content']}\n\n{told}"}, *plain[1:]]
    return [{"role": "system", "content": told}, *plain]


def _as_text(message: Mapping[str, Any], output: ToolFormat) -> dict[str, Any]:
    content = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = []
    for call in message.get("tool_calls", ()):
        begin, end = output.around(call["function"]["name"])
        calls.append(begin + json.dumps(call["function"]["arguments"], ensure_ascii=False) + end)
    return {"role": message["role"], "content": "\n".join([content, *calls] if content else calls)}
