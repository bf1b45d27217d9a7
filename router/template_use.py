"""How a conversation is put into a chat template, beside its messages. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from tandem.errors import InvalidRequest

_OURS = frozenset(
    {
        "messages",
        "conversation",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "tokenize",
        "tokenizer_kwargs",
    }
)
"""What other fields of a request set, or nobody but the router."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateUse:
    """The default is what a chat is: the prompt ends where the assistant begins to speak."""

    begins_answer: bool = True
    """Whether the beginning of an assistant's message is added."""
    continues_last: bool = False
    """Whether the last message is left open, for the model to go on with it."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """What else the template is told, such as `enable_thinking`."""


PLAIN_USE = TemplateUse()


def told_variables(chat_template_kwargs: Mapping[str, Any] | None, reasoning_effort: str | None) -> dict[str, Any]:
    """What a request tells the template: its `reasoning_effort` is one of the variables."""
    variables = dict(chat_template_kwargs or {})
    if reasoning_effort is not None:
        variables["reasoning_effort"] = reasoning_effort
    return variables


def check_variables(variables: Mapping[str, Any], known: AbstractSet[str]) -> None:
    """Raises InvalidRequest for what is not the client's to set, and for what a template that reads `known` ignores."""
    for name in variables:
        param = "reasoning_effort" if name == "reasoning_effort" else "chat_template_kwargs"
        if name in _OURS or not _NAME.fullmatch(name):
            raise InvalidRequest(f"{param}: {name!r} cannot be set there", param=param)
        if name not in known:
            raise InvalidRequest(f"{param}: this model's chat template knows no {name!r}", param=param)
