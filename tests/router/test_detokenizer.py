"""Deltas joined are the decoded output; no delta ever holds half a character."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from router.detokenizer import Detokenizer, Vocabulary, WindowDetokenizer
from tests.router_harness import tokenizer

SAMPLES = [
    "Hello, world! def f(x): return x + 1",
    "日本語のテキストと漢字",
    "Здравствуй, мир; γειά σου",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🎉🎉 é́́",
    "हिन्दी ไทย العربية עברית",
    "\n\t  spaces   \r\n\0",
]


def deltas(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 49151), max_size=40))
def test_deltas_of_any_tokens_join_to_the_decoded_output(token_ids):
    assert "".join(deltas(tokenizer().detokenizer(), token_ids)) == tokenizer().decode(token_ids)


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_deltas_of_the_tokens_of_any_text_join_to_the_decoded_output(text):
    token_ids = tokenizer().encode(text)
    assert "".join(deltas(tokenizer().detokenizer(), token_ids)) == tokenizer().decode(token_ids)


@pytest.mark.parametrize("text", SAMPLES)
def test_a_character_split_over_tokens_comes_whole(text):
    parts = deltas(tokenizer().detokenizer(), tokenizer().encode(text))
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)


def test_an_emoji_is_held_back_until_its_last_byte():
    token_ids = tokenizer().encode("🎉")
    assert len(token_ids) > 1
    *early, last, flushed = deltas(tokenizer().detokenizer(), token_ids)
    assert (set(early), last, flushed) == ({""}, "🎉", "")


def test_an_output_that_ends_inside_a_character_is_flushed_as_the_decoder_does():
    token_ids = tokenizer().encode("🎉")[:-1]
    assert "".join(deltas(tokenizer().detokenizer(), token_ids)) == tokenizer().decode(token_ids) == "\ufffd"


def test_special_and_unknown_tokens_have_no_text():
    assert deltas(tokenizer().detokenizer(), [0, 1, 2, 10**6]) == [""] * 5


def sentencepiece_like() -> Tokenizer:
    """A vocabulary of the Llama-2 kind: words with a marked space, and byte tokens for all else."""
    words = ["▁Hello", "▁world", "▁", "a", "b", "日", "!"]
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    made = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    strip = decoders.Strip(" ", 1, 0)
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    return made


def ids_of(made: Tokenizer, text: str) -> list[int]:
    """Known words as they are, others byte by byte."""
    whole = {"▁Hello", "▁world", "▁", "日"}
    names = []
    for word in text.split("|"):
        names += [word] if word in whole else [f"<0x{byte:02X}>" for byte in word.encode()]
    return [made.token_to_id(name) for name in names]


@pytest.mark.parametrize("text", ["▁Hello|▁world|!", "▁Hello|🎉|▁world", "日|本|▁|語", "▁|▁|é|▁Hello"])
def test_other_vocabularies_decode_in_a_window(text):
    made = sentencepiece_like()
    vocabulary = Vocabulary(made)
    assert not vocabulary.byte_level
    token_ids = ids_of(made, text)
    parts = deltas(vocabulary.detokenizer(), token_ids)
    assert "".join(parts) == made.decode(token_ids)
    assert not any("\ufffd" in part for part in parts)


def test_the_window_does_not_grow_with_endless_broken_bytes():
    made = sentencepiece_like()
    detokenizer = WindowDetokenizer(Vocabulary(made))
    broken = made.token_to_id("<0xFF>")
    parts = deltas(detokenizer, [broken] * 200)
    assert "".join(parts) == "\ufffd" * 200
    assert len(detokenizer._tokens) <= 32
