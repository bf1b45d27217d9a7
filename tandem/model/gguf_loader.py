"""Llama models from GGUF files: shape, fingerprint and weights under Hugging Face names.

llama.cpp interleaves the rotary halves of Q and K when it converts a model; `_unpermute` undoes that.
"""

from __future__ import annotations

from pathlib import Path

import torch

from tandem.errors import ModelLoadError
from tandem.model.digest import Span, sampled_digest
from tandem.model.gguf_file import GgufFile, Scalar
from tandem.model.rope import inverse_frequencies
from tandem.model.spec import ModelSpec
from tandem.model.weights import Weights, assemble

_GLOBAL_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


def _gguf_name(name: str) -> str:
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES[rest]}"


def _unpermute(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """`[num_heads * head_dim, in]` from pairs (0, 1), (2, 3), ... to halves (0, d/2), (1, d/2 + 1), ..."""
    num_out, num_in = weight.shape
    pairs = weight.view(num_heads, num_out // num_heads // 2, 2, num_in)
    return pairs.transpose(1, 2).reshape(num_out, num_in)


class GgufModel:
    """A Llama model in one GGUF file, opened but not read."""

    def __init__(self, path: Path, name: str) -> None:
        """Raises ModelLoadError when the file is damaged or holds something else than a Llama model."""
        self._file = GgufFile(path)
        architecture = self._file.metadata.get("general.architecture")
        if architecture != "llama":
            raise ModelLoadError(f"{path}: architecture {architecture!r} is not supported (llama is)")
        scaling = self._file.metadata.get("llama.rope.scaling.type", "none")
        if scaling != "none":
            raise ModelLoadError(f"{path}: rope scaling {scaling!r} is not supported")
        if "llama.expert_count" in self._file.metadata and self._int("llama.expert_count"):
            raise ModelLoadError(f"{path}: mixture-of-experts models are not supported")
        self.spec = self._read_spec(name)

    def _value(self, key: str, default: Scalar | None = None) -> Scalar:
        value = self._file.metadata.get(key, default)
        if value is None:
            raise ModelLoadError(f"{self._file.path}: metadata {key} is missing or not a single value")
        return value

    def _int(self, key: str, default: int | None = None) -> int:
        return int(self._value(key, default))

    def _read_spec(self, name: str) -> ModelSpec:
        file = self._file
        embedding = file.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise ModelLoadError(f"{file.path}: tensor token_embd.weight is missing")
        hidden, heads = self._int("llama.embedding_length"), self._int("llama.attention.head_count")
        head_dim = self._int("llama.attention.key_length", hidden // heads)
        if self._int("llama.rope.dimension_count", head_dim) != head_dim:
            raise ModelLoadError(f"{file.path}: rotary embedding of a part of each head is not supported")
        ends = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        return ModelSpec(
            name=name,
            num_layers=self._int("llama.block_count"),
            hidden_size=hidden,
            intermediate_size=self._int("llama.feed_forward_length"),
            num_heads=heads,
            num_kv_heads=self._int("llama.attention.head_count_kv", heads),
            head_dim=head_dim,
            vocab_size=embedding.shape[0],
            max_context_tokens=self._int("llama.context_length"),
            rms_norm_eps=float(self._value("llama.attention.layer_norm_rms_epsilon")),
            rope_theta=float(self._value("llama.rope.freq_base", 10000.0)),
            tie_word_embeddings="output.weight" not in file.tensors,
            eos_token_ids=tuple(sorted({self._int(key) for key in ends if key in file.metadata})),
            weights_digest=self._digest(),
        )

    def _digest(self) -> str:
        spans = [Span(0, self._file.header_bytes)]
        for tensor in self._file.tensors.values():
            spans.extend(Span.ends_of(tensor.offset, tensor.num_bytes))
        return sampled_digest([(memoryview(self._file.data), spans)])

    def _read(self, name: str) -> torch.Tensor:
        weight = self._file.read(_gguf_name(name))
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            num_heads = self.spec.num_heads if name.endswith("q_proj.weight") else self.spec.num_kv_heads
            if weight.dim() != 2 or weight.shape[0] != num_heads * self.spec.head_dim:
                raise ModelLoadError(f"{self._file.path}: tensor {_gguf_name(name)} has shape {tuple(weight.shape)}")
            return _unpermute(weight, num_heads)
        return weight

    def load(self, dtype: torch.dtype) -> Weights:
        """Reads and dequantizes everything. Raises ModelLoadError naming file and tensor."""
        frequencies = inverse_frequencies(self.spec.head_dim, self.spec.rope_theta)
        if "rope_freqs.weight" in self._file.tensors:
            frequencies = frequencies / self._file.read("rope_freqs.weight")
        origin = str(self._file.path)
        return assemble(self.spec, self._read, dtype=dtype, inverse_frequencies=frequencies, origin=origin)
