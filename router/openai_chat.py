"""Messages and tools as OpenAI clients send them: strict types, and as the router knows them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from router.tools import Tool, ToolUse
from tandem.errors import InvalidRequest


class TextPart(BaseModel):
    """One part of a message's content; only text."""

    model_config = ConfigDict(strict=True, extra="forbid")

    type: str
    text: str


class FunctionCall(BaseModel):
    """What an assistant called; `arguments` is the text of a JSON object."""

    model_config = ConfigDict(strict=True, extra="forbid")

    name: str
    arguments: str


class ToolCallBody(BaseModel):
    """A call in an assistant's message."""

    model_config = ConfigDict(strict=True, extra="forbid")

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall

    def plain(self, path: str) -> dict[str, Any]:
        """As chat templates know it. Raises InvalidRequest for arguments that are no JSON object."""
        param = f"{path}.function.arguments"
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError) as exc:
            raise InvalidRequest(f"{param} is not valid JSON: {exc}", param=param) from exc
        if not isinstance(arguments, dict):
            raise InvalidRequest(f"{param} must be a JSON object", param=param)
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


class Message(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(strict=True, extra="forbid")

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCallBody] | None = None
    tool_call_id: str | None = None

    def plain(self, path: str) -> dict[str, Any]:
        """Role, joined text, and calls. Raises InvalidRequest for what does not belong to the role."""
        if self.tool_calls and self.role != "assistant":
            raise InvalidRequest(f"{path}.tool_calls: only an assistant calls", param=f"{path}.tool_calls")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise InvalidRequest(
                f"{path}.tool_call_id goes with the role tool, and only with it", param=f"{path}.tool_call_id"
            )
        if self.content is None and not self.tool_calls:
            raise InvalidRequest(f"{path}.content: Field required", param=f"{path}.content")
        parts = self.content if isinstance(self.content, list) else ()
        plain: dict[str, Any] = {
            "role": self.role,
            "content": self.content if isinstance(self.content, str) else "".join(part.text for part in parts),
        }
        if self.tool_calls:
            calls = enumerate(self.tool_calls)
            plain["tool_calls"] = [call.plain(f"{path}.tool_calls[{i}]") for i, call in calls]
        if self.tool_call_id is not None:
            plain["tool_call_id"] = self.tool_call_id
        return plain


class FunctionBody(BaseModel):
    """A function that may be called."""

    model_config = ConfigDict(strict=True, extra="forbid")

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(BaseModel):
    """A tool; only functions are."""

    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["function"]
    function: FunctionBody


class FunctionName(BaseModel):
    """Names a function."""

    model_config = ConfigDict(strict=True, extra="forbid")

    name: str


class NamedTool(BaseModel):
    """The function that must be called."""

    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["function"]
    function: FunctionName


def tool_use(tools: Sequence[ToolBody], choice: str | NamedTool | None, *, parallel: bool) -> ToolUse:
    """What the client said of tools."""
    plain = tuple(
        Tool(
            name=tool.function.name,
            description=tool.function.description or "",
            parameters=tool.function.parameters,
            strict=bool(tool.function.strict),
        )
        for tool in tools
    )
    name = choice.function.name if isinstance(choice, NamedTool) else choice or "auto"
    return ToolUse(tools=plain, choice=name, parallel=parallel)
