"""Messages as OpenAI clients send them: tools and pictures are refused by name, empty fields do not matter."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.openai_types import ChatBody, parse_body
from router.prompt import Conversation, check_prompt, tokenize
from tandem.errors import InvalidRequest
from tests.router_harness import runs_async, tokenizer

USER = {"role": "user", "content": "Hi"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
PICTURE = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}


def parsed(*messages: Any) -> ChatBody:
    return parse_body(json.dumps({"messages": messages}).encode(), ChatBody)


@pytest.mark.parametrize(
    ("message", "param", "words"),
    [
        ({"role": "user", "content": [PICTURE]}, "messages[1].content[0]", "images are not supported, only text"),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_audio", "input_audio": {}}]},
            "messages[1].content[1]",
            "audio is not supported, only text",
        ),
        ({"role": "user", "content": [{"type": "smell"}]}, "messages[1].content[0]", "parts of the type 'smell' are"),
        ({"role": "function", "content": "4", "name": "f"}, "messages[1].role", "it is 'tool' now"),
        (
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
            "messages[1].function_call",
            "it is tool_calls now",
        ),
        ({"role": "tool", "content": "4"}, "messages[1].tool_call_id", "goes with the role tool"),
        ({"role": "user", "content": "4", "tool_calls": [CALL]}, "messages[1].tool_calls", "only an assistant calls"),
        ({"role": "assistant", "content": None}, "messages[1].content", "required"),
        (
            {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "[1"}}]},
            "messages[1].tool_calls[0].function.arguments",
            "not valid JSON",
        ),
    ],
)
def test_what_is_not_served_is_named_with_its_place(message: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parsed(USER, message).prompts()
    assert caught.value.param == param
    assert words in caught.value.message


def test_an_answer_can_be_sent_back_as_the_clients_dump_it() -> None:
    empty = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None}
    body = parsed(USER, {"role": "assistant", "content": "Hello", **empty}, USER)
    assert [message.content for message in body.messages] == ["Hi", "Hello", "Hi"]


@runs_async
async def test_developer_is_the_system_of_the_chat_template() -> None:
    def said_by(role: str) -> Conversation:
        return Conversation(messages=({"role": role, "content": "Be brief."}, USER))

    check_prompt(said_by("developer"), vocab_size=10)
    assert await tokenize(tokenizer(), said_by("developer")) == await tokenize(tokenizer(), said_by("system"))


def test_the_roles_that_are_accepted_are_all_listed() -> None:
    with pytest.raises(InvalidRequest, match="one of system, developer, user, assistant, tool, got 'robot'"):
        check_prompt(Conversation(messages=({"role": "robot", "content": "x"},)), vocab_size=10)
