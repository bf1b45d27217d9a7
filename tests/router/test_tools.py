"""Tools: what is refused, what the model is told, and what it is held to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import xgrammar

from router.template_use import TemplateUse
from router.tokenizer import ChatTokenizer
from router.tools import MAX_REQUIRED_CALLS, Tool, ToolFormat, ToolUse, check_tools, told_as_text, tool_grammar
from tandem.errors import InvalidRequest
from tests.router_harness import tokenizer
from tests.tiny_model import save_tiny_llama

ADD = Tool(
    name="add",
    description="Adds.",
    parameters={"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
)
LOOK = Tool(name="look")
CALLED = {"function": {"name": "add", "arguments": {"x": 1}}}
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "Go."},
    {"role": "assistant", "content": "", "tool_calls": [CALLED]},
    {"role": "tool", "content": "2", "tool_call_id": "c"},
]


def allows(use: ToolUse, text: str, output: ToolFormat = ToolFormat.LIST) -> bool:
    """Whether the whole text is an output that the grammar allows."""
    grammar = tool_grammar(use, output)
    assert grammar is not None
    vocabulary = [bytes([byte]) for byte in range(256)] + [b"<eos>"]
    info = xgrammar.TokenizerInfo(vocabulary, xgrammar.VocabType.RAW, stop_token_ids=[256])
    compiled = xgrammar.GrammarCompiler(info, max_threads=1).compile_structural_tag(grammar.text)
    matcher = xgrammar.GrammarMatcher(compiled)
    return matcher.accept_string(text) and matcher.accept_token(256)


def call(name: str, arguments: str, output: ToolFormat = ToolFormat.LIST) -> str:
    begin, end = output.around(name)
    return begin + arguments + end


@pytest.mark.parametrize(
    ("use", "param"),
    [
        (ToolUse(tools=(Tool(name="a b"),)), "tools[0].name"),
        (ToolUse(tools=(Tool(name="auto"),)), "tools[0].name"),
        (ToolUse(tools=(ADD, ADD)), "tools"),
        (ToolUse(tools=tuple(Tool(name=f"f{i}") for i in range(129))), "tools"),
        (ToolUse(choice="required"), "tool_choice"),
        (ToolUse(tools=(ADD,), choice="other"), "tool_choice"),
        (ToolUse(tools=(Tool(name="f", parameters={"not": {}}, strict=True),)), "tools[0].parameters"),
        (ToolUse(tools=(Tool(name="f", parameters={"not": {}}),), choice="f"), "tools[0].parameters"),
        (ToolUse(tools=(Tool(name="f", parameters={"type": "string"}),), choice="f"), "tools[0].parameters"),
        (ToolUse(tools=(Tool(name="f", parameters={"enum": [1]}),), choice="required"), "tools[0].parameters"),
        (ToolUse(tools=(Tool(name="f", parameters={"$ref": "#/$defs/x"}),), choice="f"), "tools[0].parameters"),
    ],
)
def test_what_cannot_be_is_refused_by_name(use: ToolUse, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_tools(use)
    assert caught.value.param == param


@pytest.mark.parametrize("output", ToolFormat)
def test_required_means_one_call_or_more_of_any_tool_and_nothing_else(output: ToolFormat) -> None:
    use = ToolUse(tools=(ADD, LOOK), choice="required")
    add, look = call("add", '{"x": 1}', output), call("look", "{}", output)
    assert allows(use, add, output)
    assert allows(use, f"{look}\n{add}", output)
    assert not allows(use, "", output)
    assert not allows(use, "No." + add, output)
    assert not allows(use, call("add", '{"x": "1"}', output), output)


@pytest.mark.parametrize("output", ToolFormat)
def test_required_calls_are_bounded_so_that_no_model_repeats_one_for_ever(output: ToolFormat) -> None:
    use = ToolUse(tools=(ADD, LOOK), choice="required")
    calls = [call("look", "{}", output)] * MAX_REQUIRED_CALLS
    assert allows(use, "\n".join(calls), output)
    assert not allows(use, "\n".join([*calls, calls[0]]), output)
    assert not allows(ToolUse(tools=(ADD, LOOK), choice="required", parallel=False), "\n".join(calls[:2]), output)


@pytest.mark.parametrize("parallel", [False, True])
def test_a_named_tool_and_no_other_is_called_exactly_once(parallel: bool) -> None:
    use = ToolUse(tools=(ADD, LOOK), choice="look", parallel=parallel)
    assert allows(use, call("look", '{"any": 1}'))
    assert not allows(use, call("add", '{"x": 1}'))
    assert not allows(use, call("look", "{}") + "\n" + call("look", "{}"))


def test_a_free_model_is_held_to_strict_tools_only_once_it_calls() -> None:
    strict = Tool(name="add", parameters=ADD.parameters, strict=True)
    use = ToolUse(tools=(strict, LOOK))
    assert allows(use, "Just text.")
    assert allows(use, "Text " + call("add", '{"x": 1}'))
    assert not allows(use, call("add", '{"y": 1}'))
    assert not allows(use, call("unknown", "{}"))
    assert tool_grammar(ToolUse(tools=(ADD, LOOK)), ToolFormat.LIST) is None
    assert tool_grammar(ToolUse(tools=(strict,), choice="none"), ToolFormat.LIST) is None


def test_a_template_without_tools_is_told_of_them_as_text() -> None:
    system, *rest = told_as_text([{"role": "system", "content": "Be brief."}, *HISTORY], [ADD], ToolFormat.LIST)
    assert system["content"].startswith("Be brief.\n\n")
    assert json.dumps(ADD.as_openai()) in system["content"]
    assert rest[1] == {"role": "assistant", "content": call("add", '{"x": 1}')}
    assert rest[2] == {"role": "user", "content": "<tool_response>\n2\n</tool_response>"}


def test_the_default_models_template_shows_tools_calls_and_answers() -> None:
    text = tokenizer().render_chat(HISTORY, [ADD])
    assert '"name": "add"' in text
    assert call("add", '{"x": 1}') in text
    assert "<tool_response>\n2\n</tool_response>" in text
    assert "named SmolLM" not in text


def test_a_template_that_knows_tools_gets_them(tmp_path: Path) -> None:
    template = (
        "{% if tools %}[{{ tools | map(attribute='function.name') | join(',') }} as <tool_call>]{% endif %}"
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}"
        "{% endif %};{% endfor %}"
    )
    loaded = ChatTokenizer.load(save_tiny_llama(tmp_path, num_kv_heads=2))
    loaded._template_owner.chat_template = template
    assert loaded.tool_format is ToolFormat.OBJECT
    assert loaded.render_chat(HISTORY, [ADD]) == "[add as <tool_call>]user:Go.;assistant:add;tool:2;"
    variable = template + "{% if enable_thinking %}think{% endif %}"
    loaded._template_owner.chat_template = variable
    assert loaded.render_chat(HISTORY, [ADD], TemplateUse(variables={"enable_thinking": True})).endswith(";think")
    loaded._template_owner.chat_template = template.replace("<tool_call>", "[TOOL_CALLS]")
    assert loaded.tool_format is None
