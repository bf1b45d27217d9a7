"""Texts that cannot fit are refused before they are tokenized."""

from __future__ import annotations

import pytest

from router.prompt import Conversation, check_length
from tandem.errors import ContextLengthExceeded


@pytest.mark.parametrize("prompt", ["x" * 101, Conversation(messages=({"role": "user", "content": "x" * 101},))])
def test_a_text_with_more_characters_than_the_context_can_stand_for_is_refused(prompt: str | Conversation) -> None:
    with pytest.raises(ContextLengthExceeded, match="101 characters"):
        check_length(prompt, max_context_tokens=10, longest_token_chars=10)


@pytest.mark.parametrize("prompt", ["x" * 100, [1] * 500])
def test_what_may_fit_is_left_to_the_tokenizer(prompt: str | list[int]) -> None:
    check_length(prompt, max_context_tokens=10, longest_token_chars=10)
