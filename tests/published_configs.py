"""What the config.json of known models say, in the form their authors gave them: fields of transformers 4, oddities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tandem.model.config_fields import ConfigFields
from tandem.model.families.family import Identity
from tandem.model.families.registry import read_config
from tandem.model.spec import ModelSpec

_COMMON: dict[str, Any] = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0",
    "use_cache": True,
}


def _config(architecture: str, model_type: str, **fields: Any) -> dict[str, Any]:
    return {**_COMMON, "architectures": [architecture], "model_type": model_type, **fields}


def _shape(hidden: int, intermediate: int, layers: int, heads: tuple[int, int], vocabulary: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "vocab_size": vocabulary,
    }


_GEMMA: dict[str, Any] = {
    "attention_bias": False,
    "cache_implementation": "hybrid",
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
}

PUBLISHED: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": _config(
        "LlamaForCausalLM",
        "llama",
        **_shape(576, 1536, 30, (9, 3), 49152),
        attention_bias=False,
        hidden_act="silu",
        is_llama_config=True,
        max_position_embeddings=8192,
        mlp_bias=False,
        pretraining_tp=1,
        rms_norm_eps=1e-05,
        rope_interleaved=False,
        rope_scaling=None,
        rope_theta=100000,
        tie_word_embeddings=True,
    ),
    "Llama-2-7b": _config(
        "LlamaForCausalLM",
        "llama",
        **_shape(4096, 11008, 32, (32, 32), 32000),
        _name_or_path="meta-llama/Llama-2-7b-hf",
        hidden_act="silu",
        max_position_embeddings=4096,
        pretraining_tp=1,
        rms_norm_eps=1e-05,
        rope_scaling=None,
        tie_word_embeddings=False,
    ),
    "Llama-3.2-1B": _config(
        "LlamaForCausalLM",
        "llama",
        **_shape(2048, 8192, 16, (32, 8), 128256),
        attention_bias=False,
        head_dim=64,
        hidden_act="silu",
        max_position_embeddings=131072,
        mlp_bias=False,
        pretraining_tp=1,
        rms_norm_eps=1e-05,
        rope_scaling={
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        rope_theta=500000.0,
        tie_word_embeddings=True,
    ),
    "Mistral-7B-v0.1": _config(
        "MistralForCausalLM",
        "mistral",
        **_shape(4096, 14336, 32, (32, 8), 32000),
        hidden_act="silu",
        max_position_embeddings=32768,
        rms_norm_eps=1e-05,
        rope_theta=10000.0,
        sliding_window=4096,
        tie_word_embeddings=False,
    ),
    "Qwen2.5-7B": _config(
        "Qwen2ForCausalLM",
        "qwen2",
        **_shape(3584, 18944, 28, (28, 4), 152064),
        hidden_act="silu",
        max_position_embeddings=131072,
        max_window_layers=28,
        rms_norm_eps=1e-06,
        rope_theta=1000000.0,
        sliding_window=131072,
        tie_word_embeddings=False,
        use_mrope=False,
        use_sliding_window=False,
    ),
    "Qwen2.5-7B-Instruct, YaRN": _config(
        "Qwen2ForCausalLM",
        "qwen2",
        **_shape(3584, 18944, 28, (28, 4), 152064),
        hidden_act="silu",
        max_position_embeddings=32768,
        max_window_layers=28,
        rms_norm_eps=1e-06,
        rope_scaling={"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
        rope_theta=1000000.0,
        sliding_window=131072,
        tie_word_embeddings=False,
        use_sliding_window=False,
    ),
    "Qwen3-0.6B": _config(
        "Qwen3ForCausalLM",
        "qwen3",
        **_shape(1024, 3072, 28, (16, 8), 151936),
        attention_bias=False,
        head_dim=128,
        hidden_act="silu",
        max_position_embeddings=40960,
        max_window_layers=28,
        rms_norm_eps=1e-06,
        rope_scaling=None,
        rope_theta=1000000,
        sliding_window=None,
        tie_word_embeddings=True,
        use_sliding_window=False,
    ),
    "SmolLM3-3B": _config(
        "SmolLM3ForCausalLM",
        "smollm3",
        **_shape(2048, 11008, 36, (16, 4), 128256),
        attention_bias=False,
        hidden_act="silu",
        layer_types=["full_attention"] * 36,
        max_position_embeddings=65536,
        max_window_layers=28,
        mlp_bias=False,
        no_rope_layer_interval=4,
        no_rope_layers=[1, 1, 1, 0] * 9,
        pad_token_id=128004,
        pretraining_tp=2,
        rms_norm_eps=1e-06,
        rope_scaling=None,
        rope_theta=5000000.0,
        sliding_window=None,
        use_sliding_window=False,
    ),
    "gemma-2-2b": _config(
        "Gemma2ForCausalLM",
        "gemma2",
        **_shape(2304, 9216, 26, (8, 4), 256000),
        **_GEMMA,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        hidden_act="gelu_pytorch_tanh",
        max_position_embeddings=8192,
        rope_theta=10000.0,
        sliding_window=4096,
    ),
    "gemma-3-1b": _config(
        "Gemma3ForCausalLM",
        "gemma3_text",
        **_shape(1152, 6912, 26, (4, 1), 262144),
        **_GEMMA,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        max_position_embeddings=32768,
        rope_local_base_freq=10000,
        rope_scaling=None,
        rope_theta=1000000,
        sliding_window=512,
        sliding_window_pattern=6,
    ),
    "Mixtral-8x7B": _config(
        "MixtralForCausalLM",
        "mixtral",
        **_shape(4096, 14336, 32, (32, 8), 32000),
        hidden_act="silu",
        max_position_embeddings=32768,
        num_experts_per_tok=2,
        num_local_experts=8,
        output_router_logits=False,
        rms_norm_eps=1e-05,
        rope_theta=1000000.0,
        router_aux_loss_coef=0.02,
        sliding_window=None,
        tie_word_embeddings=False,
    ),
    "Qwen3-30B-A3B": _config(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        **_shape(2048, 6144, 48, (32, 4), 151936),
        attention_bias=False,
        decoder_sparse_step=1,
        head_dim=128,
        hidden_act="silu",
        max_position_embeddings=40960,
        max_window_layers=48,
        mlp_only_layers=[],
        moe_intermediate_size=768,
        norm_topk_prob=True,
        num_experts=128,
        num_experts_per_tok=8,
        output_router_logits=False,
        rms_norm_eps=1e-06,
        rope_scaling=None,
        rope_theta=1000000.0,
        router_aux_loss_coef=0.001,
        sliding_window=None,
        tie_word_embeddings=False,
        use_sliding_window=False,
    ),
}


def read(values: dict[str, Any]) -> ModelSpec:
    """What a worker would make of it."""
    identity = Identity(name="m", eos_token_ids=(2,), weights_digest="d")
    return read_config(ConfigFields(values, Path("config.json")), identity)[1]
