"""What clients ask of an output's form, as grammars. Pure: whether one can be read is `tandem.model.grammar`'s."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from router.json_schema import check_schema
from tandem.errors import InvalidRequest
from tandem.types import Grammar, GrammarKind

MAX_CHOICE_TEXTS = 1024

ANY_OBJECT = Grammar(kind=GrammarKind.JSON_SCHEMA, text='{"type": "object"}')
"""Any JSON object."""


def schema_grammar(schema: Any, *, param: str) -> Grammar:
    """JSON that a schema allows; the schema as data or as text. Raises InvalidRequest.

    An object with `properties` has no others, unless the schema says so in `additionalProperties`.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as exc:
            raise InvalidRequest(f"{param} is not valid JSON: {exc}", param=param) from exc
    check_schema(schema, param=param)
    return Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema))


def regex_grammar(regex: str, *, param: str) -> Grammar:
    """Text that a regular expression matches as a whole."""
    _require_text(regex, param)
    return Grammar(kind=GrammarKind.REGEX, text=regex)


def ebnf_grammar(text: str, *, param: str) -> Grammar:
    """Text that the rule "root" gives."""
    _require_text(text, param)
    return Grammar(kind=GrammarKind.EBNF, text=text)


def choice_grammar(texts: Sequence[str], *, param: str) -> Grammar:
    """One of several texts. Raises InvalidRequest for none, too many, or an empty one."""
    if not 1 <= len(texts) <= MAX_CHOICE_TEXTS:
        raise InvalidRequest(f"{param} must be 1 to {MAX_CHOICE_TEXTS} texts, got {len(texts)}", param=param)
    for text in texts:
        _require_text(text, param)
    rule = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
    return Grammar(kind=GrammarKind.EBNF, text=f"root ::= {rule}")


def _require_text(text: str, param: str) -> None:
    if not text:
        raise InvalidRequest(f"{param} is empty", param=param)
