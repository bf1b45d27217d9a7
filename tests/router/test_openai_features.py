"""What OpenAI's own client gets for each feature, over HTTP, from a real engine with a small model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from router.app import RunningRouter, serve_frontend
from router.tokenizer import ChatTokenizer
from tandem.config import ClusterConfig, RouterConfig
from tests.pair import driver_of
from tests.router_harness import runs_async
from tests.same_answer import EngineDispatcher, make_frontend
from tests.tiny_model import save_tiny_llama

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "move",
            "parameters": {"type": "object", "properties": {"to": {"enum": ["up", "down"]}}, "required": ["to"]},
        },
    }
]
MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("features"), num_kv_heads=2)


@asynccontextmanager
async def client(model: Path) -> AsyncIterator[openai.AsyncOpenAI]:
    frontend = make_frontend(EngineDispatcher(driver_of(model)), ChatTokenizer.load(model))
    config = ClusterConfig(router=RouterConfig(grpc_port=0, http_port=0))
    router: RunningRouter = await serve_frontend(frontend, config=config)
    try:
        async with openai.AsyncOpenAI(api_key="none", base_url=f"http://{router.http_address}/v1") as api:
            yield api
    finally:
        await router.stop(0)


def over_http(model: Path, test: Callable[[openai.AsyncOpenAI], Coroutine[Any, Any, None]]) -> None:
    @runs_async
    async def run() -> None:
        async with client(model) as api:
            await test(api)

    run()


def test_n_choices_are_counted_once_for_the_prompt_and_each_for_the_output(model: Path) -> None:
    async def test(api: openai.AsyncOpenAI) -> None:
        asked: dict[str, Any] = {"model": "tiny", "prompt": ["abcd", "ef"], "seed": 3, "max_tokens": 5}
        whole = await api.completions.create(**asked, n=3, extra_body={"ignore_eos": True})
        assert [choice.index for choice in whole.choices] == list(range(6))
        assert len({choice.text for choice in whole.choices}) == 6
        assert whole.usage is not None
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (6, 30)
        one = await api.completions.create(**asked, extra_body={"ignore_eos": True})
        assert [c.text for c in one.choices] == [whole.choices[0].text, whole.choices[3].text]
        texts = [""] * 6
        stream = await api.completions.create(**asked, n=3, stream=True, extra_body={"ignore_eos": True})
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        assert texts == [choice.text for choice in whole.choices]

    over_http(model, test)


def test_logprobs_of_a_completion_with_its_prompt_line_up_with_the_text(model: Path) -> None:
    async def test(api: openai.AsyncOpenAI) -> None:
        asked: dict[str, Any] = {"model": "tiny", "prompt": "abcd", "max_tokens": 6, "temperature": 0, "logprobs": 2}
        asked |= {"echo": True, "logit_bias": {str(i): -100 for i in range(94, 257)}}
        whole = await api.completions.create(**asked)
        choice, shown = whole.choices[0], whole.choices[0].logprobs
        assert shown is not None
        assert choice.text.startswith("abcd")
        assert shown.tokens is not None
        assert "".join(shown.tokens) == choice.text
        assert shown.token_logprobs is not None
        assert shown.token_logprobs[0] is None
        assert all(value < 0 for value in shown.token_logprobs[1:])
        assert shown.text_offset == [len("".join(shown.tokens[:i])) for i in range(10)]
        assert shown.top_logprobs is not None
        assert all(2 <= len(top) <= 3 for top in shown.top_logprobs[1:])
        parts: list[Any] = []
        text = ""
        async for chunk in await api.completions.create(**asked, stream=True):
            text += chunk.choices[0].text
            parts += [chunk.choices[0].logprobs] if chunk.choices[0].logprobs else []
        assert text == choice.text
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [item for part in parts for item in getattr(part, name)] == getattr(shown, name)

    over_http(model, test)


def test_logprobs_of_a_chat_say_each_tokens_bytes(model: Path) -> None:
    async def test(api: openai.AsyncOpenAI) -> None:
        answer = await api.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=4, logprobs=True, top_logprobs=3, temperature=0
        )
        shown = answer.choices[0].logprobs
        assert shown is not None
        assert shown.content is not None
        assert len(shown.content) == 4
        for token in shown.content:
            assert len(token.top_logprobs) == 3
            assert token.top_logprobs[0].logprob == token.logprob
            assert bytes(token.bytes or []).decode("utf-8", "replace") == token.token

    over_http(model, test)


def test_prompt_logprobs_come_for_each_prompt_token_after_the_first(model: Path) -> None:
    async def test(api: openai.AsyncOpenAI) -> None:
        answer = await api.completions.create(
            model="tiny", prompt=[70, 71, 72], max_tokens=1, extra_body={"prompt_logprobs": 1}
        )
        shown = answer.choices[0].model_dump()["prompt_logprobs"]
        assert shown[0] is None
        assert ["71" in shown[1], "72" in shown[2]] == [True, True]

    over_http(model, test)


def test_a_response_format_is_held_and_wrong_ones_are_named(model: Path) -> None:
    async def test(api: openai.AsyncOpenAI) -> None:
        chat: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 60}
        bias = {str(token): -100 for token in (32, 9, 10, 13, *(220, 196, 198, 201))}
        form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
        answer = await api.chat.completions.create(**chat, response_format=form, logit_bias=bias)
        assert isinstance(json.loads(answer.choices[0].message.content or "")["ok"], bool)
        bad: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "frob"}}}
        with pytest.raises(openai.BadRequestError) as wrong:
            await api.chat.completions.create(**chat, response_format=bad)
        assert wrong.value.param == "response_format.json_schema.schema"
        for extra, param in (
            ({"ignore_eos": True}, "ignore_eos"),
            ({"min_tokens": 1}, "min_tokens"),
            ({"guided_regex": "a"}, "guided_regex"),
            ({"tools": TOOLS}, "response_format"),
        ):
            with pytest.raises(openai.BadRequestError) as both:
                await api.chat.completions.create(**chat, response_format={"type": "json_object"}, extra_body=extra)
            assert both.value.param == param

    over_http(model, test)


def test_a_required_tool_is_called_and_its_call_streams_in_parts(model: Path) -> None:
    async def test(api: openai.AsyncOpenAI) -> None:
        asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "temperature": 0}
        asked |= {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 120}
        asked |= {"logit_bias": {str(token): -100 for token in (220, 196, 198, 201)}}
        whole = (await api.chat.completions.create(**asked)).choices[0]
        assert whole.finish_reason == "tool_calls"
        assert whole.message.content is None
        [call] = whole.message.tool_calls or []
        assert call.type == "function"
        assert call.function.name == "move"
        assert json.loads(call.function.arguments)["to"] in ("up", "down")
        names, arguments, reasons = [], "", []
        async for chunk in await api.chat.completions.create(**asked, stream=True):
            choice = chunk.choices[0]
            reasons += [choice.finish_reason] if choice.finish_reason else []
            for part in choice.delta.tool_calls or []:
                assert part.function is not None
                names += [part.function.name] if part.function.name else []
                arguments += part.function.arguments or ""
        assert (names, arguments, reasons) == (["move"], call.function.arguments, ["tool_calls"])
        again: list[Any] = [*MESSAGES, whole.message, {"role": "tool", "tool_call_id": call.id, "content": "moved"}]
        after = await api.chat.completions.create(model="tiny", messages=again, tools=TOOLS, max_tokens=2)
        assert after.choices[0].finish_reason == "length"

    over_http(model, test)


def test_best_of_is_refused_with_what_to_do_instead(model: Path) -> None:
    async def test(api: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match="ask for n outputs") as wrong:
            await api.completions.create(model="tiny", prompt="a", best_of=3, n=2)
        assert wrong.value.param == "best_of"

    over_http(model, test)
