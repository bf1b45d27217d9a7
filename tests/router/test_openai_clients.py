"""The official OpenAI client and plain curl against a real router."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess

import httpx
import openai
import pytest

from tests.router_harness import running, runs_async, saying, scripted, tokenizer

MESSAGES = [{"role": "user", "content": "Hi"}]


def url(router) -> str:
    return f"http://{router.http_address}/v1"


def sync_client(router) -> openai.OpenAI:
    http = httpx.Client(trust_env=False, verify=False)
    return openai.OpenAI(base_url=url(router), api_key="none", max_retries=0, http_client=http)


def async_client(router) -> openai.AsyncOpenAI:
    http = httpx.AsyncClient(trust_env=False, verify=False)
    return openai.AsyncOpenAI(base_url=url(router), api_key="none", max_retries=0, http_client=http)


@runs_async
async def test_the_async_client_completes_and_streams_chats():
    async with running(saying("Hello 🎉")) as router, async_client(router) as api:
        whole = await api.chat.completions.create(model="test-model", messages=MESSAGES)
        stream = await api.chat.completions.create(
            model="test-model", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert whole.choices[0].message.content == "Hello 🎉"
    assert whole.usage.prompt_tokens_details.cached_tokens == 3
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello 🎉"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


@runs_async
async def test_the_async_client_completes_and_streams_text():
    async with running(saying("Hello there")) as router, async_client(router) as api:
        whole = await api.completions.create(model="test-model", prompt=["a", "b"], stop=["re"])
        stream = await api.completions.create(model="test-model", prompt="a", stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
    assert [choice.text for choice in whole.choices] == ["Hello the", "Hello the"]
    assert text == "Hello there"


@runs_async
async def test_the_sync_client_works_and_lists_models():
    def talk(router) -> tuple[str, str, list[str]]:
        with sync_client(router) as api:
            whole = api.chat.completions.create(model="test-model", messages=MESSAGES, temperature=0, max_tokens=50)
            stream = api.chat.completions.create(model="test-model", messages=MESSAGES, stream=True)
            streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            return whole.choices[0].message.content or "", streamed, [model.id for model in api.models.list()]

    async with running(saying("Hello there")) as router:
        assert await asyncio.to_thread(talk, router) == ("Hello there", "Hello there", ["test-model"])


@runs_async
async def test_the_client_raises_its_own_errors():
    async with running(saying("ok")) as router, async_client(router) as api:
        with pytest.raises(openai.NotFoundError) as missing:
            await api.chat.completions.create(model="gpt", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError) as wrong:
            await api.chat.completions.create(model="test-model", messages=MESSAGES, n=0)
    assert missing.value.code == "model_not_found"
    assert wrong.value.param == "n"


@runs_async
async def test_a_client_that_closes_its_stream_stops_the_workers():
    dispatcher = scripted(tokenizer().encode("Hello"), stall_at=1)
    async with running(dispatcher) as router, async_client(router) as api:
        stream = await api.completions.create(model="test-model", prompt="a", stream=True)
        await anext(aiter(stream))
        await stream.close()
        await dispatcher.dispatches[0].aborted.wait()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@runs_async
async def test_plain_curl_gets_an_answer_a_stream_and_an_error():
    def curl(router, *arguments: str) -> str:
        command = ["curl", "-sS", "-N", "--noproxy", "*", "--max-time", "30", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    async with running(saying("Hello 🎉")) as router:
        path = f"{url(router)}/completions"
        whole = await asyncio.to_thread(curl, router, path, "-d", '{"prompt": "a"}')
        stream = await asyncio.to_thread(curl, router, path, "-d", '{"prompt": "a", "stream": true}')
        error = await asyncio.to_thread(curl, router, path, "-d", '{"prompt": ')
    assert json.loads(whole)["choices"][0]["text"] == "Hello 🎉"
    assert stream.endswith("data: [DONE]\n\n")
    assert json.loads(error)["error"]["type"] == "invalid_request_error"
