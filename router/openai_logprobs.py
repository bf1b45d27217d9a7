"""Log-probabilities as OpenAI's two APIs show them. Builds plain data.

A token that is no whole text (part of a character) is shown as "bytes:\\x.." where it is the key of an object.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tandem.types import TokenLogprobs

Json = dict[str, Any]
Spell = Callable[[int], tuple[str, bytes]]
"""A token's text and its UTF-8 bytes."""
MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def chat_logprobs(token_ids: Sequence[int], entries: Sequence[TokenLogprobs], spell: Spell) -> Json:
    """The `logprobs` of a chat choice."""
    content = [
        _chat_token(token_id, entry.logprob, spell)
        | {
            "top_logprobs": [
                _chat_token(top_id, value, spell)
                for top_id, value in zip(entry.top_ids, entry.top_logprobs, strict=True)
            ]
        }
        for token_id, entry in zip(token_ids, entries, strict=True)
    ]
    return {"content": content, "refusal": None}


def _chat_token(token_id: int, logprob: float, spell: Spell) -> Json:
    text, raw = spell(token_id)
    return {"token": text, "logprob": max(logprob, MIN_LOGPROB), "bytes": list(raw)}


class CompletionLogprobs:
    """The `logprobs` of a completion's choice, part by part: offsets go on from one part to the next."""

    def __init__(self, spell: Spell, *, has_top: bool) -> None:
        self._spell = spell
        self._has_top = has_top
        self._offset = 0

    def part(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> Json:
        """The next tokens; None for a prompt's first one, which nothing comes before."""
        texts = [self._spell(token_id)[0] for token_id in token_ids]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [None if entry is None else max(entry.logprob, MIN_LOGPROB) for entry in entries],
            "top_logprobs": self._tops(token_ids, entries) if self._has_top else None,
            "text_offset": offsets,
        }

    def _tops(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> list[Json | None]:
        return [
            None if entry is None else self._top(token_id, entry)
            for token_id, entry in zip(token_ids, entries, strict=True)
        ]

    def _top(self, token_id: int, entry: TokenLogprobs) -> Json:
        """The most likely tokens, and the one taken where it is none of them."""
        shown = dict(zip(entry.top_ids, entry.top_logprobs, strict=True)) | {token_id: entry.logprob}
        return {self._key(each): max(value, MIN_LOGPROB) for each, value in shown.items()}

    def _key(self, token_id: int) -> str:
        text, raw = self._spell(token_id)
        if text.encode() == raw:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def joined(parts: Sequence[Json]) -> Json:
    """Parts of one choice as one."""
    return {
        key: None if parts[0][key] is None else [item for part in parts for item in part[key]] for key in parts[0]
    }


def prompt_entries(entries: Sequence[TokenLogprobs]) -> list[TokenLogprobs | None]:
    """One for each prompt token."""
    return [None, *entries]


def prompt_logprobs(token_ids: Sequence[int], entries: Sequence[TokenLogprobs], spell: Spell) -> list[Json | None]:
    """The `prompt_logprobs` of a choice: by token id, the most likely ones and the one that is there."""
    shown: list[Json | None] = [None]
    for token_id, entry in zip(token_ids[1:], entries, strict=True):
        values = dict(zip(entry.top_ids, entry.top_logprobs, strict=True)) | {token_id: entry.logprob}
        shown.append(
            {
                str(each): {"logprob": max(value, MIN_LOGPROB), "decoded_token": spell(each)[0]}
                for each, value in values.items()
            }
        )
    return shown
