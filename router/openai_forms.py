"""The form that an output must have, as OpenAI's and vLLM's clients ask for it: bodies that become grammars."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from router.grammars import ANY_OBJECT, choice_grammar, ebnf_grammar, regex_grammar, schema_grammar
from tandem.errors import InvalidRequest
from tandem.types import Grammar


class JsonSchemaFormat(BaseModel):
    """A named schema. It is held to whether `strict` or not."""

    model_config = ConfigDict(strict=True, extra="forbid")

    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(default_factory=lambda: {"type": "object"}, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """What form the output must have."""

    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def grammar(self) -> tuple[str, Grammar] | None:
        """With the field that asks for it. Raises InvalidRequest."""
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise InvalidRequest(
                "response_format.json_schema goes with the type json_schema, and only with it",
                param="response_format.json_schema",
            )
        if self.json_schema is not None:
            param = "response_format.json_schema.schema"
            return param, schema_grammar(self.json_schema.schema_, param=param)
        return ("response_format", ANY_OBJECT) if self.type == "json_object" else None


class StructuredOutputs(BaseModel):
    """vLLM's newer word for the `guided_*` fields: exactly one of them."""

    model_config = ConfigDict(strict=True, extra="forbid")

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    def grammars(self, path: str) -> list[tuple[str, Grammar]]:
        """What is asked for, each with its field below `path`. Raises InvalidRequest."""
        asked: list[tuple[str, Grammar]] = []
        if self.json_ is not None:
            asked.append((f"{path}json", schema_grammar(self.json_, param=f"{path}json")))
        if self.json_object:
            asked.append((f"{path}json_object", ANY_OBJECT))
        if self.regex is not None:
            asked.append((f"{path}regex", regex_grammar(self.regex, param=f"{path}regex")))
        if self.choice is not None:
            asked.append((f"{path}choice", choice_grammar(self.choice, param=f"{path}choice")))
        if self.grammar is not None:
            asked.append((f"{path}grammar", ebnf_grammar(self.grammar, param=f"{path}grammar")))
        return asked
