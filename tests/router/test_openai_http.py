"""The HTTP API over a real server: bodies, streams, errors, disconnects; with httpx and raw sockets."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from router.dispatch import ServedModel
from tandem.errors import WIRE_STATUS, Overloaded, WorkerUnavailable
from tests.fake_dispatcher import FakeDispatcher, Script
from tests.router_harness import EOS, running, runs_async, saying, scripted, tokenizer
from tests.router_http import CHAT, TEXT, client, events, post


@runs_async
async def test_a_completion_has_text_usage_and_a_finish_reason():
    response = await post("/v1/completions", saying("Hello 🎉"), json={**TEXT, "request_id": "r1"})
    body = response.json()
    assert (body["id"], body["object"], body["model"]) == ("cmpl-r1", "text_completion", "test-model")
    ended = {"finish_reason": "stop", "stop_reason": None}
    assert body["choices"] == [{"index": 0, "text": "Hello 🎉", "logprobs": None, **ended}]
    num_tokens = len(tokenizer().encode("Hello 🎉")) + 1
    assert body["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": num_tokens,
        "total_tokens": 1 + num_tokens,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert response.headers["x-request-id"] == "r1"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", [[81]]),
        ([5, 6], [[5, 6]]),
        (["a", "a"], [[81], [81]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_every_form_of_a_prompt_gives_its_choices_by_index(prompt, expected, stream):
    if prompt == "a" or prompt == ["a", "a"]:
        expected = [tokenizer().encode("a")] * len(expected)

    @runs_async
    async def run():
        dispatcher = FakeDispatcher(lambda request: Script(token_ids=[request.prompt_token_ids[0], EOS]))
        body = {"prompt": prompt, "return_token_ids": True}
        async with running(dispatcher) as router, client(router) as http:
            if stream:
                chunks = [json.loads(text) for text in (await events(http, "/v1/completions", body))[:-1]]
                choices = [choice for chunk in chunks for choice in chunk["choices"]]
            else:
                choices = (await http.post("/v1/completions", json=body)).json()["choices"]
        for index, ids in enumerate(expected):
            own = [choice for choice in choices if choice["index"] == index]
            assert [c["prompt_token_ids"] for c in own if "prompt_token_ids" in c] == [ids]
            assert [t for choice in own for t in choice["token_ids"]] == [ids[0], EOS]
            assert "".join(c["text"] for c in own) == tokenizer().decode([ids[0]])
            assert [c["finish_reason"] for c in own if c["finish_reason"]] == ["stop"]

    run()


@runs_async
async def test_a_streamed_chat_begins_with_the_role_and_ends_with_done():
    async with running(saying("Hello there")) as router, client(router) as http:
        *chunks, done = await events(http, "/v1/chat/completions", CHAT)
    parsed = [json.loads(chunk) for chunk in chunks]
    assert done == "[DONE]"
    assert parsed[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in parsed) == "Hello there"
    assert [chunk["choices"][0]["finish_reason"] for chunk in parsed][-1] == "stop"
    assert {chunk["object"] for chunk in parsed} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in parsed}) == 1
    assert all("usage" not in chunk for chunk in parsed)


@runs_async
async def test_include_usage_adds_a_last_chunk_without_choices():
    async with running(saying("ok")) as router, client(router) as http:
        body = {**CHAT, "stream_options": {"include_usage": True}}
        *chunks, _done = [
            json.loads(c) if c != "[DONE]" else c for c in await events(http, "/v1/chat/completions", body)
        ]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == len(tokenizer().encode("ok")) + 1
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


@runs_async
async def test_chat_content_may_be_parts_of_text():
    dispatcher = saying("ok")
    content = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    response = await post("/v1/chat/completions", dispatcher, json={"messages": [{"role": "user", "content": content}]})
    assert response.json()["choices"][0]["message"] == {"role": "assistant", "content": "ok", "refusal": None}
    expected = tokenizer().encode_chat([{"role": "user", "content": "Hello"}])
    assert list(dispatcher.dispatches[0].request.prompt_token_ids) == expected


@runs_async
async def test_every_sampling_field_arrives():
    dispatcher = scripted([5], repeat=True)
    fields = {"temperature": 0, "top_p": 0.5, "top_k": 3, "seed": 2**64 - 1, "stop_token_ids": [9]}
    body = {**CHAT, **fields, "max_completion_tokens": 4, "ignore_eos": True, "timeout_s": 5}
    assert (await post("/v1/chat/completions", dispatcher, json=body)).status_code == 200
    request = dispatcher.dispatches[0].request
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0, 0.5, 3, 2**64 - 1)
    assert (sampling.max_tokens, sampling.stop_token_ids) == (4, (9,))
    assert request.deadline_s - request.arrival_s == pytest.approx(5)


@runs_async
async def test_harmless_fields_and_neutral_values_are_accepted():
    body = {**CHAT, "user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "n": 1}
    body |= {"logprobs": False, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": None, "tools": None}
    body |= {"response_format": {"type": "text"}, "top_logprobs": None, "stop": None}
    response = await post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text


@runs_async
async def test_completions_without_max_tokens_stop_after_sixteen_as_openai_s_do():
    def script(request):
        return Script(token_ids=[5], repeat=True)

    dispatcher = FakeDispatcher(script)
    async with running(dispatcher) as router, client(router) as http:
        reply = (await http.post("/v1/completions", json=TEXT)).json()
    assert dispatcher.dispatches[0].request.sampling.max_tokens == 16
    assert reply["usage"]["completion_tokens"] == 16


@runs_async
async def test_max_tokens_beyond_the_context_names_the_numbers():
    error = (await post("/v1/completions", json={**TEXT, "max_tokens": 100_000})).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "100000" in error["message"]
    assert "99999" in error["message"]


@pytest.mark.parametrize("cls", list(WIRE_STATUS))
@pytest.mark.parametrize("stream", [False, True])
def test_every_error_before_the_first_token_has_its_status_and_body(cls, stream):
    @runs_async
    async def run():
        dispatcher = scripted([], error=cls("went wrong", param="p", retry_after_s=1.2))
        response = await post("/v1/completions", dispatcher, json={**TEXT, "stream": stream})
        row = WIRE_STATUS[cls]
        assert (response.status_code, response.headers["retry-after"]) == (row.http, "2")
        expected = {"message": "went wrong", "type": row.openai_type, "param": "p", "code": cls.code}
        assert response.json() == {"error": expected}

    run()


@runs_async
async def test_an_error_after_the_first_token_is_an_event_and_the_stream_closes():
    dispatcher = scripted([5], error=WorkerUnavailable("worker d0 died"), stall_at=1)
    async with running(dispatcher) as router, client(router) as http:

        async def fail_after_first_token() -> None:
            await dispatcher.arrived.wait()
            await dispatcher.dispatches[0].stalled.wait()
            await asyncio.sleep(0.05)  # lets the first token leave; without it, the test would see a 503
            dispatcher.dispatches[0].release.set()

        failing = asyncio.create_task(fail_after_first_token())
        *_, last, done = await events(http, "/v1/completions", TEXT)
        await failing
    assert done == "[DONE]"
    assert json.loads(last)["error"]["code"] == "worker_unavailable"


@runs_async
async def test_one_failing_prompt_of_several_stops_the_others():
    def script(request):
        return Script(error=Overloaded("full")) if request.prompt_token_ids == (6,) else Script(stall_at=0)

    dispatcher = FakeDispatcher(script)
    response = await post("/v1/completions", dispatcher, json={"prompt": [[5], [6], [7]]})
    assert response.status_code == 429
    assert all(dispatch.aborted.is_set() for dispatch in dispatcher.dispatches)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stall_at", [0, 1])
def test_a_client_that_disconnects_stops_the_workers(stream, stall_at):
    @runs_async
    async def run():
        dispatcher = scripted([5, 6], stall_at=stall_at)
        async with running(dispatcher) as router:
            sock = await send_raw(router.http_address, {**TEXT, "stream": stream})
            await dispatcher.arrived.wait()
            await dispatcher.dispatches[0].stalled.wait()
            if stream and stall_at:
                assert b"200 OK" in await asyncio.get_running_loop().sock_recv(sock, 4096)
            sock.close()
            await dispatcher.dispatches[0].aborted.wait()

    run()


@runs_async
async def test_a_client_that_stops_reading_is_ended_and_others_go_on():
    def script(request):
        return Script(token_ids=[5], repeat=True) if request.sampling.seed == 1 else Script(token_ids=[5, EOS])

    long_name = ServedModel(name="m" * 20_000, max_context_tokens=100_000, block_size=16)  # fills the sockets fast
    dispatcher = FakeDispatcher(script, served=long_name)
    async with running(dispatcher, output_buffer_tokens=64) as router, client(router) as http:
        body = {**TEXT, "stream": True, "seed": 1, "return_token_ids": True, "max_tokens": 90_000}
        sock = await send_raw(router.http_address, body)
        await dispatcher.arrived.wait()
        await dispatcher.dispatches[0].aborted.wait()
        assert (await http.post("/v1/completions", json=TEXT)).status_code == 200
        sock.close()


async def send_raw(address: str, body: dict) -> socket.socket:
    """Sends a request on a socket of our own, with a small receive buffer, and reads nothing."""
    host, port = address.split(":")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, (host, int(port)))
    payload = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(payload)}\r\n\r\n"
    await loop.sock_sendall(sock, head.encode() + payload)
    return sock


@runs_async
async def test_models_health_and_metrics():
    dispatcher = saying("ok")
    async with running(dispatcher) as router, client(router) as http:
        (model,) = (await http.get("/v1/models")).json()["data"]
        assert (model["id"], model["object"]) == ("test-model", "model")
        assert (await http.get("/v1/models/test-model")).json() == model
        assert (await http.get("/v1/models/other/model")).status_code == 404
        assert (await http.get("/health")).status_code == 200
        await http.post("/v1/completions", json=TEXT)
        metrics = await http.get("/metrics")
        assert 'tandem_router_requests_total{code="ok"} 1.0' in metrics.text
        assert metrics.headers["content-type"].startswith("text/plain")
        dispatcher.is_ready, dispatcher.served = False, None
        assert (await http.get("/health")).status_code == 503
        assert (await http.post("/v1/completions", json=TEXT)).status_code == 503


@runs_async
async def test_a_request_id_in_use_is_a_409():
    dispatcher = scripted([5], stall_at=0)
    async with running(dispatcher) as router, client(router) as http:
        first = asyncio.create_task(http.post("/v1/completions", json={**TEXT, "request_id": "r1"}))
        await dispatcher.arrived.wait()
        assert (await http.post("/v1/completions", json={**TEXT, "request_id": "r1"})).status_code == 409
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


@runs_async
async def test_vllm_s_words_for_all_tokens_and_negative_seeds_and_forms_are_understood():
    dispatcher = scripted([EOS])
    body = {**TEXT, "top_k": -1, "seed": -1, "structured_outputs": {"choice": ["yes", "no"]}}
    assert (await post("/v1/completions", dispatcher, json=body)).status_code == 200
    sampling = dispatcher.dispatches[0].request.sampling
    assert (sampling.top_k, sampling.seed) == (0, 2**64 - 1)
    assert sampling.grammar is not None
    assert '"yes"' in sampling.grammar.text


@runs_async
async def test_a_chat_may_go_on_with_its_last_message():
    dispatcher = scripted([EOS])
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}]
    body = {"messages": messages, "continue_final_message": True}
    assert (await post("/v1/chat/completions", dispatcher, json=body)).status_code == 200
    prompt = tokenizer().decode(list(dispatcher.dispatches[0].request.prompt_token_ids), keep_special=True)
    assert prompt.endswith("<|im_start|>assistant\nWell")


@runs_async
async def test_tokenize_says_what_a_prompt_s_tokens_would_be_and_detokenize_reads_them_back():
    async with running(saying("ok")) as router, client(router) as http:
        text = (await http.post("/tokenize", json={"prompt": "Hello 🎉", "return_token_strs": True})).json()
        assert text["tokens"] == tokenizer().encode("Hello 🎉")
        assert (text["count"], text["max_model_len"]) == (len(text["tokens"]), 100_000)
        assert text["token_strs"][0] == "Hello"
        chat = (await http.post("/tokenize", json=CHAT)).json()
        assert chat["tokens"] == tokenizer().encode_chat(CHAT["messages"])
        assert chat["token_strs"] is None
        back = (await http.post("/detokenize", json={"tokens": text["tokens"]})).json()
        assert back == {"prompt": "Hello 🎉"}
        assert (await http.get("/version")).json()["version"]
        assert (await http.get("/ping")).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"stop": ["x", "there"]}, "there"), ({"stop_token_ids": [EOS]}, EOS), ({}, None), ({"max_tokens": 1}, None)],
)
def test_a_choice_says_what_stopped_it(fields, reason, stream):
    @runs_async
    async def run():
        async with running(saying("Hello there")) as router, client(router) as http:
            if stream:
                chunks = [json.loads(text) for text in (await events(http, "/v1/completions", TEXT | fields))[:-1]]
                [choice] = [c for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
            else:
                [choice] = (await http.post("/v1/completions", json=TEXT | fields)).json()["choices"]
        assert choice["stop_reason"] == reason

    run()
