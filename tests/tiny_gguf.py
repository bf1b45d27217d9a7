"""Small models as GGUF files, laid out as llama.cpp's converter does it, written with the gguf package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from tests.tiny_model import VOCAB_SIZE, byte_tokenizer

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def save_gguf(path: Path, directory: Path, **metadata: Any) -> Path:
    """The model of a Hugging Face directory as fp32; `metadata` (`rope.scaling.type`, ...) is added, or replaces."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    writer = gguf.GGUFWriter(path, model.config.model_type)
    for key, value in {**_shape(model.config), **metadata}.items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add = writer.add_uint32 if isinstance(value, int) else add
        add(f"{model.config.model_type}.{key}", value)
    _add_tokenizer(writer)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight" or not model.config.tie_word_embeddings:
            writer.add_tensor(_gguf_name(name), _laid_out(name, tensor.numpy(), model.config))
    if model.model.rotary_emb.rope_type == "llama3":
        inverse = model.model.rotary_emb.inv_freq
        theta, size = model.config.rope_parameters["rope_theta"], 2 * len(inverse)
        plain = theta ** -(torch.arange(0, size, 2, dtype=torch.float32) / size)
        writer.add_tensor("rope_freqs.weight", (plain / inverse).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _shape(config: Any) -> dict[str, int | float]:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {
        "vocab_size": config.vocab_size,
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    vocab = byte_tokenizer().get_vocab()
    tokens = sorted(vocab, key=lambda token: vocab[token])
    tokens += ["ab", *(f"<unused{i}>" for i in range(VOCAB_SIZE - len(tokens) - 1))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * 256 + [gguf.TokenType.CONTROL] * (len(tokens) - 256))
    writer.add_token_merges(["a b"])  # a tokenizer of this kind without any is refused
    writer.add_eos_token_id(256)
    writer.add_bos_token_id(256)


def _gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if not stem.startswith("model.layers."):
        return f"{_NAMES[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest]}.{kind}"


def _laid_out(name: str, tensor: NDArray[np.float32], config: Any) -> NDArray[np.float32]:
    """A Llama's queries and keys have their rotary halves interleaved."""
    num_heads = {"q_proj.weight": config.num_attention_heads, "k_proj.weight": config.num_key_value_heads}
    count = num_heads.get(name.split("self_attn.")[-1])
    if config.model_type != "llama" or count is None:
        return tensor
    halves = tensor.reshape(count, 2, tensor.shape[0] // count // 2, tensor.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(tensor.shape))
