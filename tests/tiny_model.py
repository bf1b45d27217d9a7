"""Small random-weight Llama models as Hugging Face directories, with a byte tokenizer: real files, soon loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
VOCAB_SIZE = 320


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, and an end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate([*alphabet, "<eos>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", chat_template=CHAT_TEMPLATE)


def save_tiny_llama(
    directory: Path,
    *,
    num_kv_heads: int,
    tied: bool = False,
    max_shard_size: str = "1GB",
    seed: int = 0,
    **config: Any,
) -> Path:
    """Writes a 3-layer model with 4 heads of 16 and a vocabulary of 320; returns `directory`.

    Weights are drawn wide, so that the most likely token stands out and argmax means something.
    """
    torch.manual_seed(seed)
    llama = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=256,
        **config,
    )
    LlamaForCausalLM(llama).save_pretrained(directory, max_shard_size=max_shard_size)
    byte_tokenizer().save_pretrained(directory)
    return directory
