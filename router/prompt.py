"""The three forms of a prompt, their checks, and the one tokenization of each request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.template_use import PLAIN_USE, TemplateUse
from router.tokenizer import ChatTokenizer
from router.tools import NO_TOOLS, ToolUse, check_tools
from router.validation import check_text, check_token_ids
from tandem.errors import ContextLengthExceeded, InvalidRequest

ROLES = ("system", "developer", "user", "assistant", "tool")
"""What a message may say of its author."""
_ALIASES = {"developer": "system"}
"""Newer clients' words for what chat templates know under an older one."""
_INLINE_CHARS = 2_000
"""Longer texts are tokenized in a thread, so that other streams do not wait for them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """A chat prompt, oldest message first, and the tools that the model may call.

    A message has "role" and "content"; an assistant's may have "tool_calls" as chat templates know them, each with a
    "function" of "name" and "arguments" (a mapping); a tool's has "tool_call_id".
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: ToolUse = NO_TOOLS
    template: TemplateUse = PLAIN_USE


Prompt = str | Sequence[int] | Conversation


def check_prompt(prompt: Prompt, *, vocab_size: int) -> None:
    """Raises InvalidRequest for an empty prompt, text without a UTF-8 form, ids outside the vocabulary, odd roles."""
    if isinstance(prompt, Conversation):
        _check_messages(prompt.messages)
        check_tools(prompt.tools)
    elif isinstance(prompt, str):
        check_text(prompt, param="prompt")
    elif not prompt:
        raise InvalidRequest("prompt is empty", param="prompt")
    else:
        check_token_ids(prompt, vocab_size=vocab_size, param="prompt")


def check_length(prompt: Prompt, *, max_context_tokens: int, longest_token_chars: int) -> None:
    """Raises ContextLengthExceeded for a text that cannot fit whatever its tokens are, before it costs anything."""
    if isinstance(prompt, Conversation):
        num_chars = sum(len(message["content"]) for message in prompt.messages)
    else:
        num_chars = len(prompt) if isinstance(prompt, str) else 0
    fewest = -(-num_chars // longest_token_chars)
    if fewest > max_context_tokens:
        raise ContextLengthExceeded(
            f"the prompt has {num_chars} characters, at least {fewest} tokens; the context is {max_context_tokens}",
            param="prompt",
        )


async def tokenize(tokenizer: ChatTokenizer, prompt: Prompt) -> Sequence[int]:
    """The prompt's token ids. Raises InvalidRequest when the chat template refuses the messages."""
    if isinstance(prompt, Conversation):
        messages = [{**message, "role": _ALIASES.get(message["role"], message["role"])} for message in prompt.messages]
        size = sum(len(message["content"]) for message in messages)
        return await _run(size, lambda: tokenizer.encode_chat(messages, prompt.tools.offered, prompt.template))
    if isinstance(prompt, str):
        text = prompt
        return await _run(len(text), lambda: tokenizer.encode(text))
    return prompt


async def _run(num_chars: int, encode: Callable[[], list[int]]) -> list[int]:
    return encode() if num_chars <= _INLINE_CHARS else await asyncio.to_thread(encode)


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if not messages:
        raise InvalidRequest("messages is empty", param="messages")
    for i, message in enumerate(messages):
        if message["role"] not in ROLES:
            raise InvalidRequest(
                f"messages[{i}].role must be one of {', '.join(ROLES)}, got {message['role']!r}",
                param=f"messages[{i}].role",
            )
        if message["content"]:
            check_text(message["content"], param=f"messages[{i}].content")
