"""What a gRPC client asks, in the router's own words. Translates, refuses what cannot be read; bounds are elsewhere."""

from __future__ import annotations

import json
from typing import Any

from router.grammars import ANY_OBJECT, choice_grammar, ebnf_grammar, regex_grammar, schema_grammar
from router.prompt import Conversation
from router.tools import Tool, ToolUse
from router.validation import SamplingOptions
from tandem.errors import InvalidRequest
from tandem.rpc.tandem.v1 import common_pb2, inference_pb2
from tandem.types import Grammar


def options_from_proto(sampling: common_pb2.SamplingParams) -> SamplingOptions:
    """Presence is kept: a field that was not set is None. Raises InvalidRequest for an unreadable grammar."""

    def given(name: str) -> Any:
        return getattr(sampling, name) if sampling.HasField(name) else None  # type: ignore[arg-type]

    return SamplingOptions(
        temperature=given("temperature"),
        top_p=given("top_p"),
        top_k=given("top_k"),
        min_p=given("min_p"),
        seed=given("seed"),
        max_tokens=given("max_tokens"),
        min_tokens=given("min_tokens"),
        stop=tuple(sampling.stop),
        stop_token_ids=tuple(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        include_stop_str_in_output=sampling.include_stop_str_in_output,
        presence_penalty=given("presence_penalty"),
        frequency_penalty=given("frequency_penalty"),
        repetition_penalty=given("repetition_penalty"),
        logit_bias=tuple(sampling.logit_bias.items()),
        logprobs=given("logprobs"),
        prompt_logprobs=given("prompt_logprobs"),
        n=given("n"),
        priority=given("priority"),
        cache_salt=sampling.cache_salt,
        grammar=_grammar(sampling.grammar) if sampling.HasField("grammar") else None,
    )


def _grammar(message: common_pb2.Grammar) -> Grammar:
    form = message.WhichOneof("form")
    if form == "json_schema":
        return schema_grammar(message.json_schema, param="grammar.json_schema")
    if form == "regex":
        return regex_grammar(message.regex, param="grammar.regex")
    if form == "choice":
        return choice_grammar(message.choice.texts, param="grammar.choice")
    if form == "ebnf":
        return ebnf_grammar(message.ebnf, param="grammar.ebnf")
    if form == "json_object" and message.json_object:
        return ANY_OBJECT
    raise InvalidRequest("grammar is empty: set one of its forms", param="grammar")


def conversation_from_proto(request: inference_pb2.ChatRequest) -> Conversation:
    """Messages and tools. Raises InvalidRequest for JSON that cannot be read, and for calls in the wrong place."""
    return Conversation(
        messages=tuple(_message(message, f"messages[{i}]") for i, message in enumerate(request.messages)),
        tools=ToolUse(
            tools=tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools)),
            choice=request.tool_choice or "auto",
            parallel=request.parallel_tool_calls if request.HasField("parallel_tool_calls") else True,
        ),
    )


def _message(message: inference_pb2.ChatMessage, path: str) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls and message.role != "assistant":
        raise InvalidRequest(f"{path}.tool_calls: only an assistant calls", param=f"{path}.tool_calls")
    if message.tool_call_id and message.role != "tool":
        raise InvalidRequest(f"{path}.tool_call_id: only a tool answers a call", param=f"{path}.tool_call_id")
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": _object(call.arguments or "{}", f"{path}.tool_calls[{i}].arguments"),
                },
            }
            for i, call in enumerate(message.tool_calls)
        ]
    if message.tool_call_id:
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _tool(tool: inference_pb2.Tool, path: str) -> Tool:
    return Tool(
        name=tool.name,
        description=tool.description,
        parameters=_object(tool.parameters, f"{path}.parameters") if tool.parameters else None,
        strict=tool.strict,
    )


def _object(text: str, param: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise InvalidRequest(f"{param} is not valid JSON: {exc}", param=param) from exc
    if not isinstance(value, dict):
        raise InvalidRequest(f"{param} must be a JSON object", param=param)
    return value
