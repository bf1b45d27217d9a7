"""Calls are found in an output whatever its cuts, and what is no call is not lost."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from router.tool_parser import ToolCallParser

LIST = '<tool_call>[{"name": "add", "arguments": {"x": 1}}, {"name": "look", "arguments": {}}]</tool_call>'
OBJECTS = (
    'Well.\n<tool_call>\n{"name": "add", "arguments": {"s": "a } \\" ] b"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "look", "arguments": {"at": [1, {"z": null}]}}\n</tool_call>'
)
TURNED = '<tool_call>{"arguments": {"x": 1}, "name": "add"}</tool_call>'
AS_TEXT = '<tool_call>{"name": "add", "arguments": "{\\"x\\": 1}"}</tool_call>'


def parse(*parts: str) -> tuple[str, list[tuple[str, str]], list[str]]:
    """Content, (name, arguments) of each call, ids."""
    numbers = itertools.count()
    parser = ToolCallParser(lambda: f"call_{next(numbers)}")
    content, names, ids, arguments = "", [], [], []
    for parsed in [*(parser.push(part) for part in parts), parser.flush()]:
        content += parsed.content
        for call in parsed.calls:
            if call.name:
                assert call.index == len(names)
                names.append(call.name)
                ids.append(call.call_id)
                arguments.append("")
            arguments[call.index] += call.arguments
    assert parser.has_calls == bool(names)
    return content, list(zip(names, arguments, strict=True)), ids


@pytest.mark.parametrize("text", [LIST, OBJECTS, TURNED])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_delta_has_one_entry_for_each_call(text: str, size: int) -> None:
    parser = ToolCallParser(lambda: "id")
    for at in range(0, len(text), size):
        indices = [part.index for part in parser.push(text[at : at + size]).calls]
        assert len(indices) == len(set(indices))


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (LIST, "", [("add", '{"x": 1}'), ("look", "{}")]),
        (OBJECTS, "Well.\n", [("add", '{"s": "a } \\" ] b"}'), ("look", '{"at": [1, {"z": null}]}')]),
        (TURNED, "", [("add", '{"x": 1}')]),
        (AS_TEXT, "", [("add", '{"x": 1}')]),
        ("no call at all < b", "no call at all < b", []),
        ("<tool_call>not json</tool_call> after", "<tool_call>not json</tool_call> after", []),
        ("<tool_call>[]</tool_call>", "<tool_call>[]</tool_call>", []),
        ("<tool_call> cut off", "<tool_call> cut off", []),
        ('<tool_call>[{"name": "add", "arguments": {"x": 1', "", [("add", '{"x": 1')]),
        (TURNED + "\n and so", "\n and so", [("add", '{"x": 1}')]),
        (TURNED + "\n\n", "", [("add", '{"x": 1}')]),
        ("a <tool_cal", "a <tool_cal", []),
    ],
)
def test_calls_and_content_are_told_apart(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    found_content, found, ids = parse(text)
    assert (found_content, found) == (content, calls)
    assert ids == [f"call_{i}" for i in range(len(calls))]


PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", '{"name": "f", "arguments": ', '{"x": "}"}', "}", "[", "]", "\n", " w ", ", ", "<"]
)


@settings(max_examples=100, deadline=None)
@given(st.lists(PIECES, max_size=14).map("".join) | st.sampled_from([LIST, OBJECTS, TURNED, AS_TEXT]), st.data())
def test_no_cut_of_the_text_changes_what_is_found(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=20)))
    parts = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    assert parse(*parts) == parse(text) == parse(*text)


def test_arguments_are_given_while_they_come() -> None:
    parser = ToolCallParser(lambda: "id")
    head = parser.push('<tool_call>[{"name": "f", "arguments": {"te')
    assert [(c.name, c.arguments) for c in head.calls] == [("f", '{"te')]
    assert [c.arguments for c in parser.push('xt": "ab').calls] == ['xt": "ab']
