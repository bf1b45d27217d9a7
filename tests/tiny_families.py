"""Small random-weight models of every family, as Hugging Face directories that transformers wrote.

Shapes have what is real about each family: heads wider than the hidden size allows, groups, windows, biases, experts.
Windows are short, so that short prompts cross them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.tiny_model import VOCAB_SIZE, byte_tokenizer

WINDOW = 24
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "pad_token_id": None,
    "eos_token_id": 256,
}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A class of transformers' configurations, and the fields that differ from `_SHAPE`."""

    config: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    attention: str = "sdpa"
    """For the oracle; `eager` where scores are capped, which transformers leaves out of the fused kernel."""
    post_norm_shift: float = 0.0
    """Added to the norms after the halves of a layer. Without it, what these add is drowned by the scaled embedding of
    the token itself, which tied models then repeat for ever."""


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
_GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": WINDOW}
_GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}

KINDS: dict[str, Kind] = {
    "llama 2": Kind(config="LlamaConfig", fields={"num_key_value_heads": 4}),
    "llama 3": Kind(config="LlamaConfig", fields={"rope_parameters": LLAMA3_ROPE, "max_position_embeddings": 1024}),
    "llama, linear": Kind(config="LlamaConfig", fields={"rope_parameters": LINEAR_ROPE}),
    "mistral": Kind(config="MistralConfig", fields={"head_dim": 32, "sliding_window": WINDOW}),
    "qwen 2": Kind(config="Qwen2Config", fields={"tie_word_embeddings": True}),
    "qwen 2, window and yarn": Kind(
        config="Qwen2Config",
        fields={
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 2,
            "rope_parameters": YARN_ROPE,
        },
    ),
    "qwen 3": Kind(config="Qwen3Config", fields={"head_dim": 32, "tie_word_embeddings": True}),
    "smollm 3": Kind(config="SmolLM3Config"),
    "smollm 3, window": Kind(config="SmolLM3Config", fields={"use_sliding_window": True, "sliding_window": WINDOW}),
    "gemma 2": Kind(
        config="Gemma2Config",
        fields={**_GEMMA, "attn_logit_softcapping": 4.0, "final_logit_softcapping": 9.0},
        attention="eager",
        post_norm_shift=3.0,
    ),
    "gemma 3": Kind(
        config="Gemma3TextConfig",
        fields={**_GEMMA, "num_hidden_layers": 7, "rope_parameters": _GEMMA3_ROPES},
        post_norm_shift=3.0,
    ),
    "mixtral": Kind(config="MixtralConfig", fields={"num_local_experts": 6, "num_experts_per_tok": 2}),
    "qwen 3 moe": Kind(
        config="Qwen3MoeConfig",
        fields={
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "mlp_only_layers": [2],
        },
    ),
}


def save_tiny(directory: Path, name: str, *, max_shard_size: str = "1GB", seed: int = 0) -> Path:
    """Writes the model and a byte tokenizer; returns `directory`.

    Norms and biases are drawn too: where they are 1 and 0, as transformers makes them, a forgotten one is not missed.
    """
    kind = KINDS[name]
    torch.manual_seed(seed)
    config = getattr(transformers, kind.config)(**{**_SHAPE, **kind.fields})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            if "layernorm" in label and "post_" in label:
                parameter.add_(kind.post_norm_shift)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    byte_tokenizer().save_pretrained(directory)
    return directory
