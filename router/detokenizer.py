"""Incremental detokenization: tokens in one by one, text out as soon as it is certain, never half a character.

Two strategies. Byte-level vocabularies (GPT-2's and its descendants) map each token to bytes, and an incremental
UTF-8 decoder does the rest: exact, constant time per token. Any other vocabulary decodes a short window that begins
at the last certain point; there text is exact except for ill-formed runs of byte tokens longer than the window.
"""

from __future__ import annotations

import codecs
import re
from typing import Protocol

from tokenizers import Tokenizer, decoders

_REPLACEMENT = "\ufffd"
_MAX_HELD_TOKENS = 16
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"
"""How SentencePiece vocabularies write a space."""


class Detokenizer(Protocol):
    """The text of one output. `push` per token, then `flush` once; the parts joined are the decoded output."""

    def push(self, token_id: int) -> str:
        """The text that became certain; may be empty."""

    def flush(self) -> str:
        """What is left at the end: an incomplete character becomes U+FFFD."""


class Vocabulary:
    """What all outputs of one tokenizer share: token texts, which tokens are special, how they become bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.special_ids = frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self.byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self._bytes: dict[int, bytes] = {}

    def detokenizer(self) -> Detokenizer:
        """A new one, for one output."""
        return ByteLevelDetokenizer(self) if self.byte_level else WindowDetokenizer(self)

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes of a token of a byte-level vocabulary; empty for special and unknown ids."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._lookup(token_id)
        return known

    def spelled(self, token_id: int) -> tuple[str, bytes]:
        """One token alone as text and as bytes; special tokens are spelled out, unknown ids are empty."""
        token = self.tokenizer.id_to_token(token_id)
        if token is None:
            return "", b""
        if token_id in self.special_ids:
            return token, token.encode()
        if self.byte_level:
            raw = self.token_bytes(token_id)
            return raw.decode("utf-8", "replace"), raw
        if (byte := _BYTE_TOKEN.fullmatch(token)) is not None:
            raw = bytes([int(byte[1], 16)])
            return raw.decode("utf-8", "replace"), raw
        text = token.replace(_SPACE, " ")
        return text, text.encode()

    def _lookup(self, token_id: int) -> bytes:
        token = None if token_id in self.special_ids else self.tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        try:
            return bytes(_BYTE_OF[char] for char in token)
        except KeyError:
            return token.encode()


class ByteLevelDetokenizer:
    """One output of a byte-level vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """See Detokenizer."""
        return self._decoder.decode(self._vocabulary.token_bytes(token_id))

    def flush(self) -> str:
        """See Detokenizer."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """One output of any other vocabulary.

    The window holds the tokens of the last certain text (so that a decoder which strips the first space strips
    nothing here) and those after it: `tokens[:certain]` decode to `_certain_text`.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokens: list[int] = []
        self._num_certain = 0
        self._certain_text = ""

    def push(self, token_id: int) -> str:
        """See Detokenizer."""
        if token_id in self._vocabulary.special_ids:
            return ""
        self._tokens.append(token_id)
        text = self._decode(self._tokens)
        num_held = len(self._tokens) - self._num_certain
        if text.endswith(_REPLACEMENT) and num_held < _MAX_HELD_TOKENS:
            return ""
        return self._advance(text)

    def flush(self) -> str:
        """See Detokenizer."""
        return self._advance(self._decode(self._tokens))

    def _advance(self, text: str) -> str:
        new = text[len(self._certain_text) :]
        if new:
            del self._tokens[: self._num_certain]
            self._num_certain = len(self._tokens)
            self._certain_text = self._decode(self._tokens)
        return new

    def _decode(self, token_ids: list[int]) -> str:
        return self._vocabulary.tokenizer.decode(token_ids, skip_special_tokens=True)


def _byte_alphabet() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 stands for itself, other bytes for U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()
