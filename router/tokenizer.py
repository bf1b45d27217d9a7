"""The model's tokenizer and chat template, from a local directory. Text to ids and back; no policy, no network."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer

from router.detokenizer import Detokenizer, Vocabulary
from router.template_use import PLAIN_USE, TemplateUse, check_variables
from router.template_variables import template_variables
from router.tools import OPEN, Tool, ToolFormat, told_as_text
from tandem.errors import InvalidRequest, ModelLoadError

os.environ.setdefault("HF_HUB_OFFLINE", "1")


class ChatTokenizer:
    """Encodes prompts and conversations, decodes outputs. Its methods may be called from any thread."""

    def __init__(self, tokenizer: Any, *, eos_token_ids: tuple[int, ...]) -> None:
        """`tokenizer` is a transformers tokenizer that is backed by the `tokenizers` library."""
        self._template_owner = tokenizer
        self._backend: Tokenizer = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._vocabulary = Vocabulary(self._backend)
        self.eos_token_ids = eos_token_ids
        self.longest_token_chars: int = max((len(token) for token in self._backend.get_vocab()), default=1)
        """No token stands for more characters than this."""
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)

    @classmethod
    def load(cls, directory: Path) -> ChatTokenizer:
        """Reads tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json.

        Raises ModelLoadError when there is no usable tokenizer.
        """
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        except (OSError, ValueError, KeyError) as exc:
            raise ModelLoadError(f"no usable tokenizer in {directory}: {exc}") from exc
        if not hasattr(tokenizer, "backend_tokenizer"):
            raise ModelLoadError(f"the tokenizer in {directory} has no tokenizer.json form")
        return cls(tokenizer, eos_token_ids=_eos_token_ids(tokenizer, directory))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text prompt. Special tokens written in it are parsed; the config decides about a BOS token."""
        return list(self._backend.encode(text, add_special_tokens=True).ids)

    @property
    def _template(self) -> str:
        return str(self._template_owner.chat_template or "")

    @property
    def tool_format(self) -> ToolFormat | None:
        """How the model writes calls of tools; None when its template tells it another way than is known here.

        A template that knows no tools at all is told of them as text.
        """
        if "tools" not in self._template:
            return ToolFormat.LIST
        return ToolFormat.OBJECT if OPEN in self._template else None

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool] = (), use: TemplateUse = PLAIN_USE
    ) -> str:
        """The conversation as the model's prompt, with the beginning of the assistant's turn unless `use` says other.

        Raises InvalidRequest when the model has no chat template or the template refuses the messages.
        """
        if not self._template_owner.chat_template:
            raise InvalidRequest("this model has no chat template; send the prompt as text", param="messages")
        self._check_variables(use.variables)
        given = [tool.as_openai() for tool in tools] or None
        if "tools" in self._template:
            told = [dict(message) for message in messages]
        else:
            told, given = told_as_text(messages, tools, ToolFormat.LIST), None
        try:
            rendered = self._template_owner.apply_chat_template(
                told,
                tools=given,
                tokenize=False,
                add_generation_prompt=use.begins_answer,
                continue_final_message=use.continues_last,
                **use.variables,
            )
        except (TemplateError, TypeError, ValueError) as exc:
            raise InvalidRequest(f"the chat template refuses the messages: {exc}", param="messages") from exc
        return str(rendered)

    def _check_variables(self, variables: Mapping[str, Any]) -> None:
        if not variables:
            return
        try:
            known = template_variables(self._template)
        except TemplateError as exc:
            raise InvalidRequest(f"the chat template cannot be read: {exc}", param="chat_template_kwargs") from exc
        check_variables(variables, known)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool] = (), use: TemplateUse = PLAIN_USE
    ) -> list[int]:
        """Token ids of `render_chat`; the template itself holds the special tokens. Raises InvalidRequest."""
        return list(self._backend.encode(self.render_chat(messages, tools, use), add_special_tokens=False).ids)

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """One token alone: as text, with U+FFFD for what is no whole character, and as UTF-8 bytes.

        Special tokens are spelled out.
        """
        return self._vocabulary.spelled(token_id)

    def decode(self, token_ids: Sequence[int], *, keep_special: bool = False) -> str:
        """The text of a whole output, special tokens left out unless they are kept."""
        return self._backend.decode(list(token_ids), skip_special_tokens=not keep_special)

    def detokenizer(self) -> Detokenizer:
        """A new incremental detokenizer, for one output."""
        return self._vocabulary.detokenizer()


def _eos_token_ids(tokenizer: Any, directory: Path) -> tuple[int, ...]:
    """The tokenizer's end-of-sequence id and those of generation_config.json, in ascending order."""
    ids = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    path = directory / "generation_config.json"
    if path.exists():
        try:
            listed = json.loads(path.read_text()).get("eos_token_id")
        except (ValueError, AttributeError) as exc:
            raise ModelLoadError(f"{path} is not a JSON object: {exc}") from exc
        ids |= set(listed) if isinstance(listed, list) else {listed} - {None}
    return tuple(sorted(ids))
