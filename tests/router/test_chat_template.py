"""What a request may tell the chat template: the variables that it reads, and no word that only stands in it."""

from __future__ import annotations

import shutil
from pathlib import Path

import httpx
import pytest

from router.app import serve
from router.template_use import TemplateUse
from router.template_variables import template_variables
from router.tokenizer import ChatTokenizer
from tandem.config import ClusterConfig, RouterConfig
from tandem.errors import InvalidRequest
from tandem.model.files import DEFAULT_MODEL, resolve_model
from tests.router_harness import runs_async, saying

TEMPLATE = """
{#- comment_word -#}
{%- if mode is not defined %}{% set mode = "plain_word" %}{% endif -%}
{%- for message in messages -%}
  {%- if not message.content %}{{ raise_exception("empty") }}{% endif -%}
  {%- generation %}{{ message.role }}: {{ message["content"] }}{% endgeneration -%}
  {%- if loop.last %}{% break %}{% endif -%}
{%- endfor -%}
[{{ mode }}][{{ reasoning_effort | default("none") }}]
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    copy = tmp_path / "tokenizer"
    shutil.copytree(resolve_model(DEFAULT_MODEL).tokenizer_dir, copy)
    (copy / "chat_template.jinja").write_text(TEMPLATE)
    return copy


def test_what_a_template_reads_is_what_it_does_not_make_itself() -> None:
    assert template_variables(TEMPLATE) == {"messages", "mode", "reasoning_effort"}


@pytest.mark.parametrize("word", ["comment_word", "plain_word", "message", "loop", "content", "raise_exception"])
def test_a_word_of_the_template_that_is_no_variable_is_refused(directory: Path, word: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": {word: "x"}}

    @runs_async
    async def run() -> None:
        answer = await ask(directory, "/v1/chat/completions", body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "chat_template_kwargs")
        assert f"knows no {word!r}" in error["message"]

    run()


def test_tokenize_takes_reasoning_effort_as_chat_completions_does(directory: Path) -> None:
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "reasoning_effort": "high",
        "chat_template_kwargs": {"mode": "m"},
    }

    @runs_async
    async def run() -> None:
        answer = await ask(directory, "/tokenize", body)
        assert answer.status_code == 200, answer.text
        tokenizer = ChatTokenizer.load(directory)
        assert tokenizer.decode(answer.json()["tokens"]) == "user: Hi[m][high]"

    run()


def test_a_template_that_cannot_be_read_is_an_invalid_request(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{% if %}")
    tokenizer = ChatTokenizer.load(directory)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        tokenizer.render_chat([{"role": "user", "content": "Hi"}], use=TemplateUse(variables={"mode": "m"}))


async def ask(directory: Path, path: str, body: dict[str, object]) -> httpx.Response:
    config = ClusterConfig(router=RouterConfig(http_port=0, grpc_port=0))
    router = await serve(config=config, dispatcher=saying("ok"), tokenizer_dir=directory)
    try:
        async with httpx.AsyncClient(trust_env=False) as http:
            return await http.post(f"http://{router.http_address}{path}", json=body)
    finally:
        await router.stop(0)
