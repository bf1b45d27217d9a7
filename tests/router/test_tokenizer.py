"""The default model's tokenizer: text, special tokens, chat template, end-of-sequence ids."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

from router.tokenizer import ChatTokenizer
from tandem.errors import InvalidRequest, ModelLoadError
from tandem.model.files import DEFAULT_MODEL, resolve_model
from tests.router_harness import EOS, tokenizer


@pytest.fixture
def directory(tmp_path):
    copy = tmp_path / "tokenizer"
    shutil.copytree(resolve_model(DEFAULT_MODEL).tokenizer_dir, copy)
    return copy


def test_text_comes_back_as_it_was():
    text = "Grüße, 世界! 🎉\n\tdef f(): pass"
    assert tokenizer().decode(tokenizer().encode(text)) == text


def test_special_tokens_in_text_are_parsed_and_none_is_added():
    assert tokenizer().encode("<|im_end|>") == [EOS]
    assert EOS not in tokenizer().encode("plain")
    assert 1 not in tokenizer().encode("plain")


def test_encoding_equals_that_of_transformers():
    text = "The quick brown fox <|im_start|> 123"
    assert tokenizer().encode(text) == tokenizer()._template_owner(text).input_ids


def test_a_conversation_ends_with_the_beginning_of_the_assistants_turn():
    rendered = tokenizer().render_chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    assert rendered == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer().decode(tokenizer().encode_chat(messages)).endswith("user\nHi\nassistant\n")


def test_threads_may_encode_at_once():
    texts = [f"text number {i} " * 200 for i in range(16)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(tokenizer().encode, texts)) == [tokenizer().encode(text) for text in texts]


def test_end_of_sequence_ids_of_the_generation_config_count_too(directory):
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    assert ChatTokenizer.load(directory).eos_token_ids == (0, 2)


def test_a_template_that_refuses_the_messages_is_an_invalid_request(directory):
    (directory / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        ChatTokenizer.load(directory).encode_chat([{"role": "user", "content": "Hi"}])


def test_a_model_without_a_template_says_so(directory):
    (directory / "chat_template.jinja").unlink()
    with pytest.raises(InvalidRequest, match="no chat template"):
        ChatTokenizer.load(directory).encode_chat([{"role": "user", "content": "Hi"}])


def test_a_directory_without_a_tokenizer_is_a_load_error(tmp_path):
    with pytest.raises(ModelLoadError, match="no usable tokenizer"):
        ChatTokenizer.load(tmp_path)


def test_a_broken_generation_config_is_a_load_error(directory):
    (directory / "generation_config.json").write_text("[]")
    with pytest.raises(ModelLoadError, match="generation_config"):
        ChatTokenizer.load(directory)
