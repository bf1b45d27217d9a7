"""What clients ask of an output's form: what a grammar would not hold is refused, what is asked is what is allowed."""

from __future__ import annotations

from typing import Any

import pytest
import xgrammar

from router.grammars import ANY_OBJECT, choice_grammar, ebnf_grammar, regex_grammar, schema_grammar
from tandem.errors import InvalidRequest
from tandem.model.grammar import check_grammar
from tandem.types import Grammar, GrammarKind


def allows(grammar: Grammar, text: str) -> bool:
    check_grammar(grammar, param="grammar")
    vocabulary = [bytes([byte]) for byte in range(256)] + [b"<eos>"]
    info = xgrammar.TokenizerInfo(vocabulary, xgrammar.VocabType.RAW, stop_token_ids=[256])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)
    compile_text: dict[GrammarKind, Any] = {
        GrammarKind.JSON_SCHEMA: compiler.compile_json_schema,
        GrammarKind.REGEX: compiler.compile_regex,
        GrammarKind.EBNF: compiler.compile_grammar,
    }
    matcher = xgrammar.GrammarMatcher(compile_text[grammar.kind](grammar.text))
    return matcher.accept_string(text) and matcher.accept_token(256)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (ANY_OBJECT, '{"a": [1, {"b": null}]}', "[1]"),
        (schema_grammar(SCHEMA, param="p"), '{"a": 1}', '{"a": "1"}'),
        (schema_grammar(SCHEMA, param="p"), '{ "a": 2}', '{"a": 1, "b": 2}'),
        (schema_grammar('{"enum": ["x", 3]}', param="p"), '"x"', '"y"'),
        (regex_grammar("[a-c]+x?", param="p"), "abcx", "abcy"),
        (choice_grammar(["yes", 'say "no"\n', "ünï ✓"], param="p"), 'say "no"\n', "yesno"),
        (choice_grammar(["yes", "ünï ✓"], param="p"), "ünï ✓", "uni"),
        (ebnf_grammar('root ::= "a" | "b" root', param="p"), "bba", "bb"),
    ],
)
def test_a_grammar_allows_what_was_asked_and_nothing_else(grammar: Grammar, right: str, wrong: str) -> None:
    assert allows(grammar, right)
    assert not allows(grammar, wrong)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"not": {}}, "'not'"),
        ({"properties": {"a": {"items": {"uniqueItems": True}}}}, "p.properties.a.items: the keyword 'uniqueItems'"),
        ({"anyOf": [{"type": "string"}, {"if": {}}]}, "p.anyOf[1]: the keyword 'if'"),
        ({"$defs": {"x": {"contains": {}}}}, "p.$defs.x: the keyword 'contains'"),
        ({"allOf": [{}, {}]}, "'allOf' is supported with one member only"),
        ({"properties": {"a": 5}}, "p.properties.a must be a JSON Schema"),
        ({"items": {"multipleOf": 100}}, "p.items: the keyword 'multipleOf'"),
        ({"type": "object", "required": ["zz"]}, "'required' names 'zz'"),
        ({"required": "a"}, "'required' must be a list of names"),
        ({"type": []}, "'type' must be one or several of"),
        ({"type": "frob"}, "'type' must be one or several of"),
        ({"anyOf": []}, "'anyOf' must be a list that is not empty"),
        ({"enum": []}, "'enum' must be a list that is not empty"),
        ({"$ref": "http://x/y"}, "'$ref' is supported within the schema only"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {}}, "minimum": 3}, "'$ref' is supported without 'minimum'"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {}}, "type": "string"}, "'$ref' is supported without 'type'"),
        ({"anyOf": [{"type": "string"}], "maxLength": 2}, "'anyOf' is supported without 'maxLength'"),
        ({"anyOf": [{"type": "string"}], "type": "object"}, "must be that of each member"),
        ({"allOf": [{}], "properties": {}}, "'allOf' is supported without 'properties'"),
        ({"const": 1, "enum": [2]}, "'enum' is supported without 'const'"),
        ({"type": "string", "minLength": 3, "pattern": "^a+$"}, "'pattern' is supported without 'minLength'"),
        ({"type": "integer", "enum": ["a"]}, "'a' is not of the type 'integer'"),
        ({"type": "integer", "const": True}, "True is not of the type 'integer'"),
        ([], "must be a JSON Schema"),
        ("{", "not valid JSON"),
    ],
)
def test_what_would_not_be_held_is_refused_with_its_place(schema: Any, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        schema_grammar(schema, param="p")
    assert words in caught.value.message
    assert caught.value.param == "p"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": ["string", "null"], "enum": ["a", None], "title": "A", "default": None},
        {"anyOf": [{"type": "string"}, {"type": "null"}], "description": "either"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}, "description": "a"},
        {"type": "object", "properties": {"a": {"const": 1, "type": "number"}}, "required": ["a"]},
        {"type": "object", "anyOf": [{"type": "object", "properties": {}}]},
    ],
)
def test_what_libraries_write_beside_a_keyword_is_taken(schema: Any) -> None:
    check_grammar(schema_grammar(schema, param="p"), param="p")


def test_what_only_looks_like_a_keyword_is_none() -> None:
    schema = {"properties": {"not": {"type": "string"}, "a": {"enum": [{"if": 1}]}}, "uniqueItems": False}
    schema_grammar(schema, param="p")


def test_a_schema_that_never_ends_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100):
        deep = {"items": deep}
    with pytest.raises(InvalidRequest, match="nested deeper"):
        schema_grammar(deep, param="p")


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(kind=GrammarKind.JSON_SCHEMA, text='{"type": "frob"}'),
        Grammar(kind=GrammarKind.REGEX, text="(["),
        Grammar(kind=GrammarKind.EBNF, text="root ::= nothing"),
        Grammar(kind=GrammarKind.EBNF, text="r" * 200_001),
        Grammar(kind=GrammarKind.STRUCTURAL_TAG, text="{}"),
    ],
)
def test_what_cannot_be_read_is_an_error_that_names_the_field(grammar: Grammar) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_grammar(grammar, param="the_field")
    assert caught.value.param == "the_field"
    assert caught.value.message.startswith("the_field")
    assert "\n" not in caught.value.message
    assert ".cc" not in caught.value.message
