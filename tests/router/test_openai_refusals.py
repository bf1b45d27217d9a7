"""What the HTTP API refuses: with a status and OpenAI's error body, which names the field; and counted once."""

from __future__ import annotations

import pytest

from tests.router_harness import running, runs_async, saying
from tests.router_http import CHAT, TEXT, client, post


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 129),
        ("priority", 101),
        ("priority", -101),
        ("priority", 1.5),
        ("n", True),
        ("best_of", 3),
        ("logprobs", True),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
        ("top_logprobs", 5),
        ("echo", 1),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"49152": 1}),
        ("logit_bias", {"a": 1}),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("tools", [{"type": "function"}]),
        ("suffix", "x"),
        ("min_p", 1.1),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("guided_json", '{"type": "object", "not": {}}'),
        ("guided_json", "{"),
        ("guided_json", {"type": "frob"}),
        ("guided_regex", "(["),
        ("guided_regex", ""),
        ("guided_choice", []),
        ("guided_grammar", "root ::= nothing"),
        ("no_such_field", None),
    ],
)
def test_a_value_that_is_not_served_is_refused_by_its_fields_name(field, value):
    @runs_async
    async def run():
        response = await post("/v1/completions", json={**TEXT, field: value})
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (400, field, "invalid_request")
        assert field in error["message"]

    run()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {}, "prompt"),
        ("/v1/completions", {"prompt": ""}, "prompt"),
        ("/v1/completions", {"prompt": []}, "prompt"),
        ("/v1/completions", {"prompt": [[]]}, "prompt"),
        ("/v1/completions", {"prompt": [""]}, "prompt"),
        ("/v1/completions", {"prompt": ["a", 5]}, "prompt"),
        ("/v1/completions", {"prompt": [5, True]}, "prompt"),
        ("/v1/completions", {"prompt": [1.5]}, "prompt"),
        ("/v1/completions", {"prompt": 7}, "prompt"),
        ("/v1/completions", {"prompt": [-1]}, "prompt"),
        ("/v1/completions", {"prompt": [49152]}, "prompt"),
        ("/v1/completions", {"prompt": ["a"] * 257}, "prompt"),
        ("/v1/completions", {"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "max_tokens": "5"}, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "max_tokens": True}, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 10**30}, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "temperature": -1}, "temperature"),
        ("/v1/completions", {"prompt": "a", "temperature": "hot"}, "temperature"),
        ("/v1/completions", {"prompt": "a", "top_p": 0}, "top_p"),
        ("/v1/completions", {"prompt": "a", "top_k": -2}, "top_k"),
        ("/v1/completions", {"prompt": "a", "seed": -(2**63) - 1}, "seed"),
        ("/v1/completions", {"prompt": "a", "stop": ["x"] * 17}, "stop"),
        ("/v1/completions", {"prompt": "a", "stop": [5]}, "stop[0]"),
        ("/v1/completions", {"prompt": "a", "stop_token_ids": [-1]}, "stop_token_ids"),
        ("/v1/completions", {"prompt": "a", "timeout_s": -1}, "timeout_s"),
        ("/v1/completions", {"prompt": "a", "request_id": "a b"}, "request_id"),
        ("/v1/completions", {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        ("/v1/completions", {"prompt": "a", "stream": "yes"}, "stream"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": "Hi"}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("/v1/chat/completions", {**CHAT, "max_completion_tokens": -1}, "max_completion_tokens"),
        ("/v1/chat/completions", {**CHAT, "prompt": "a"}, "prompt"),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        ("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ("/v1/chat/completions", {**CHAT, "reasoning_effort": "low"}, "reasoning_effort"),
        (
            "/v1/chat/completions",
            {**CHAT, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": "(["}}, "structured_outputs.regex"),
        (
            "/v1/completions",
            {"prompt": "a", "structured_outputs": {"regex": "a", "choice": ["a"]}},
            "structured_outputs.choice",
        ),
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
        ("/tokenize", {"prompt": "a", "messages": CHAT["messages"]}, "prompt"),
        ("/tokenize", {}, "prompt"),
        ("/detokenize", {"tokens": [49152]}, "tokens"),
    ],
)
def test_a_wrong_body_is_a_400_that_names_the_field(path, body, param):
    @runs_async
    async def run():
        response = await post(path, json=body)
        error = response.json()["error"]
        assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
        assert set(error) == {"message", "type", "param", "code"}

    run()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not valid JSON"),
        (b'{"prompt": ', "not valid JSON"),
        (b'{"prompt": "\xff"}', "not valid UTF-8"),
        (b"[1]", "JSON object, got an array"),
        (b"null", "JSON object, got null"),
        (b'{"prompt": "a", "temperature": NaN}', "NaN"),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature"),
        (b'{"prompt": "a\\ud800"}', "Unicode"),
        (b"[" * 100_000, "not valid JSON"),
    ],
)
def test_a_malformed_body_is_a_400_that_says_why(content, words):
    @runs_async
    async def run():
        response = await post("/v1/completions", content=content)
        assert response.status_code == 400
        assert words in response.json()["error"]["message"]

    run()


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "not_found"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
    ],
)
def test_unknown_routes_and_wrong_methods_have_error_bodies(method, path, status, code):
    @runs_async
    async def run():
        async with running(saying("ok")) as router, client(router) as http:
            response = await http.request(method, path)
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)

    run()


@runs_async
async def test_an_unknown_model_is_a_404_with_its_code():
    response = await post("/v1/completions", json={**TEXT, "model": "gpt-\U0001f600"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("/v1/completions", {**TEXT, "model": "other"}, "model_not_found"),
        ("/v1/completions", {"prompt": 7}, "invalid_request"),
        ("/v1/completions", {**TEXT, "temperature": 9}, "invalid_request"),
        ("/v1/chat/completions", {"messages": "Hi"}, "invalid_request"),
        ("/v1/completions", {**TEXT, "max_tokens": 10**6}, "context_length_exceeded"),
    ],
)
def test_a_refused_request_is_counted_once_by_its_code(path, body, code):
    @runs_async
    async def run():
        async with running(saying("ok")) as router, client(router) as http:
            assert (await http.post(path, json=body)).json()["error"]["code"] == code
            text = (await http.get("/metrics")).text
        lines = [line for line in text.splitlines() if line.startswith("tandem_router_requests_total{")]
        assert [line for line in lines if not line.endswith(" 0.0")] == [
            f'tandem_router_requests_total{{code="{code}"}} 1.0'
        ]

    run()
