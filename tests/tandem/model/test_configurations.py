"""The configurations of known models are read as transformers reads them; what would change the answer is refused."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tandem.errors import ModelLoadError
from tandem.kv.layout import KvLayout
from tandem.model.rope import rotary_frequencies
from tandem.model.spec import fingerprint
from tests.published_configs import PUBLISHED, read


def of_transformers(values: dict[str, Any]) -> Any:
    return transformers.CONFIG_MAPPING[values["model_type"]].from_dict(deepcopy(values))


@pytest.mark.parametrize("model", PUBLISHED)
def test_a_published_configuration_has_the_shape_that_transformers_sees(model: str) -> None:
    spec, config = read(PUBLISHED[model]), of_transformers(PUBLISHED[model])
    assert spec.family == config.model_type
    assert (spec.num_layers, spec.hidden_size) == (config.num_hidden_layers, config.hidden_size)
    assert (spec.num_heads, spec.num_kv_heads) == (config.num_attention_heads, config.num_key_value_heads)
    assert spec.head_dim == (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    assert (spec.intermediate_size, spec.vocab_size) == (config.intermediate_size, config.vocab_size)
    assert (spec.rms_norm_eps, spec.tie_word_embeddings) == (config.rms_norm_eps, config.tie_word_embeddings)


@pytest.mark.parametrize("model", PUBLISHED)
def test_a_published_configuration_has_the_windows_that_transformers_sees(model: str) -> None:
    config = of_transformers(PUBLISHED[model])
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    expected = [window if kind == "sliding_attention" else None for kind in kinds]
    assert [layer.window for layer in read(PUBLISHED[model]).layers] == expected


@pytest.mark.parametrize("model", PUBLISHED)
def test_a_published_configuration_has_the_positions_that_transformers_sees(model: str) -> None:
    spec, config = read(PUBLISHED[model]), of_transformers(PUBLISHED[model])
    ropes = config.rope_parameters
    nested = "full_attention" in ropes
    for rope, kind in zip(spec.ropes, ["full_attention", "sliding_attention"] if nested else [None], strict=True):
        found = ropes[kind] if kind else ropes
        frequencies = rotary_frequencies(rope, spec.head_dim)
        assert rope.theta == found["rope_theta"]
        if found["rope_type"] != "default":
            inverse, scale = ROPE_INIT_FUNCTIONS[found["rope_type"]](config)
            assert frequencies.inverse.allclose(inverse, rtol=1e-6, atol=0.0)
            assert frequencies.scale == pytest.approx(scale)


def test_yarn_makes_the_context_as_long_as_it_stretches() -> None:
    assert read(PUBLISHED["Qwen2.5-7B-Instruct, YaRN"]).max_context_tokens == 131072


def test_layers_without_positions_and_layers_with_experts_are_where_the_configuration_says() -> None:
    assert [layer.rope for layer in read(PUBLISHED["SmolLM3-3B"]).layers] == [0, 0, 0, None] * 9
    sparse = {**PUBLISHED["Qwen3-30B-A3B"], "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert [layer.has_experts for layer in read(sparse).layers[:6]] == [False, True, False, False, False, True]


@pytest.mark.parametrize(
    ("model", "changed", "named"),
    [
        ("Llama-3.2-1B", {"model_type": "phi3"}, r"model_type 'phi3'"),
        ("Llama-3.2-1B", {"architectures": ["LlamaForSequenceClassification"]}, r"architectures .*Classification"),
        ("Llama-3.2-1B", {"attention_bias": True}, r"attention_bias True"),
        ("Llama-3.2-1B", {"mlp_bias": True}, r"mlp_bias True"),
        ("Llama-3.2-1B", {"hidden_act": "relu"}, r"hidden_act 'relu'"),
        ("Llama-3.2-1B", {"quantization_config": {"bits": 4}}, r"quantization_config \{'bits': 4\}"),
        ("Llama-3.2-1B", {"rope_interleaved": True}, r"rope_interleaved True"),
        ("Llama-3.2-1B", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0\.5"),
        ("Llama-3.2-1B", {"residual_multiplier": 0.22}, r"residual_multiplier 0\.22"),
        ("Llama-3.2-1B", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, r"rope_scaling\.type 'dynamic'"),
        ("Llama-3.2-1B", {"rope_scaling": {"rope_type": "longrope"}}, r"rope_scaling\.rope_type 'longrope'"),
        ("Llama-3.2-1B", {"rope_scaling": {"type": "linear", "factor": 2.0, "x": 1}}, r"rope_scaling\.x 1"),
        ("Mistral-7B-v0.1", {"layer_types": ["sliding_attention"] * 32}, r"layer_types \['sliding"),
        ("Qwen2.5-7B", {"layer_types": ["linear_attention"] * 28}, r"layer_types 'linear_attention'"),
        ("Qwen2.5-7B", {"layer_types": ["full_attention"]}, r"layer_types must have an entry for each of 28"),
        ("Qwen2.5-7B", {"use_mrope": True}, r"use_mrope True"),
        (
            "Qwen2.5-7B",
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.0}},
            r"rope_scaling\.mscale 0\.7",
        ),
        ("Qwen3-0.6B", {"head_dim": None}, r"head_dim is missing"),
        ("SmolLM3-3B", {"no_rope_layers": [1, 0]}, r"no_rope_layers has 2 entries"),
        ("gemma-2-2b", {"use_bidirectional_attention": True}, r"use_bidirectional_attention True"),
        ("gemma-2-2b", {"hidden_activation": "gelu"}, r"hidden_activation 'gelu'"),
        ("gemma-3-1b", {"final_logit_softcapping": 30.0}, r"final_logit_softcapping 30\.0"),
        ("gemma-3-1b", {"model_type": "gemma3"}, r"model_type 'gemma3'"),
        ("Mixtral-8x7B", {"num_experts_per_tok": 9}, r"num_experts_per_tok 9"),
        ("Qwen3-30B-A3B", {"use_sliding_window": True}, r"use_sliding_window True"),
        ("Qwen3-30B-A3B", {"vocab_size": "many"}, r"vocab_size must be a whole number of 1 or more, got 'many'"),
        ("Qwen3-30B-A3B", {"decoder_sparse_step": 0}, r"decoder_sparse_step must be .* 1 or more, got 0"),
        ("Qwen3-0.6B", {"rope_scaling": {"type": "linear", "factor": 0.0}}, r"rope_scaling\.factor must .* above 0"),
        ("Qwen3-0.6B", {"use_sliding_window": 1}, r"use_sliding_window must be true or false, got 1"),
        ("SmolLM3-3B", {"no_rope_layers": "all"}, r"no_rope_layers must be a list of whole numbers"),
        ("gemma-3-1b", {"rope_scaling": [8]}, r"rope_scaling must be an object, got \[8\]"),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(model: str, changed: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelLoadError, match=rf"config\.json: {named}"):
        read({**PUBLISHED[model], **changed})


@pytest.mark.parametrize(
    ("model", "changed"),
    [
        ("Mistral-7B-v0.1", {"sliding_window": 2048}),
        ("Llama-3.2-1B", {"rope_theta": 10000.0}),
        ("Qwen2.5-7B-Instruct, YaRN", {"rope_scaling": None}),
        ("SmolLM3-3B", {"no_rope_layers": [1] * 36}),
        ("gemma-2-2b", {"query_pre_attn_scalar": 144}),
        ("gemma-2-2b", {"attn_logit_softcapping": None}),
        ("gemma-3-1b", {"rope_local_base_freq": 20000}),
        ("Mixtral-8x7B", {"num_experts_per_tok": 1}),
        ("Qwen3-30B-A3B", {"norm_topk_prob": False}),
        ("Qwen3-30B-A3B", {"mlp_only_layers": [4]}),
    ],
)
def test_models_whose_keys_and_values_would_differ_have_different_fingerprints(
    model: str, changed: dict[str, Any]
) -> None:
    """Even if their files had the same digest."""
    specs = [read(PUBLISHED[model]), read({**PUBLISHED[model], **changed})]
    layout: KvLayout = specs[0].kv_layout(block_size=16, dtype="bfloat16")
    assert fingerprint(specs[0], layout) != fingerprint(specs[1], layout)


def test_who_digests_payloads_otherwise_has_another_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    model = read(PUBLISHED["gemma-2-2b"])
    layout: KvLayout = model.kv_layout(block_size=16, dtype="bfloat16")
    ours = fingerprint(model, layout)
    monkeypatch.setattr("tandem.model.spec.PAYLOAD_DIGEST", "xxh3-64")
    assert fingerprint(model, layout) != ours


@pytest.mark.parametrize(
    ("changed", "named"),
    [({"num_key_value_heads": 3}, "3 KV heads for 16 heads"), ({"head_dim": 127}, "odd width 127")],
)
def test_heads_that_cannot_be_computed_are_refused(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelLoadError, match=named):
        read({**PUBLISHED["Qwen3-0.6B"], **changed})
