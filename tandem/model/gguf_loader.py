"""Llama and Qwen models from GGUF files: shape, fingerprint and weights.

llama.cpp interleaves the rotary halves of a Llama's Q and K when it converts it (not a Qwen's); `_unpermute` undoes
that. Format of the metadata: ggml's docs/gguf.md.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from tandem.errors import ModelLoadError
from tandem.model.assemble import Assembler, TensorSource, check_shape
from tandem.model.config_fields import ConfigFields
from tandem.model.device_io import HOST
from tandem.model.digest import Span, sampled_digest
from tandem.model.gguf_file import GgufFile
from tandem.model.parallel import ModelShard
from tandem.model.rope import RotaryFrequencies, rotary_frequencies
from tandem.model.spec import LayerSpec, LinearScaling, ModelSpec, RopeSpec
from tandem.model.tensor_names import AttentionNames, DenseNames, TensorNames
from tandem.model.weights import Weights

_LLAMA = TensorNames(
    embedding="token_embd.weight",
    final_norm="output_norm.weight",
    lm_head="output.weight",
    layer="blk.{layer}.",
    attention=AttentionNames(
        norm="attn_norm.weight",
        q="attn_q.weight",
        k="attn_k.weight",
        v="attn_v.weight",
        output="attn_output.weight",
    ),
    mlp_norm="ffn_norm.weight",
    dense=DenseNames(gate="ffn_gate.weight", up="ffn_up.weight", down="ffn_down.weight"),
)
_QWEN2 = replace(
    _LLAMA, attention=replace(_LLAMA.attention, q_bias="attn_q.bias", k_bias="attn_k.bias", v_bias="attn_v.bias")
)
_QWEN3 = replace(
    _LLAMA, attention=replace(_LLAMA.attention, q_norm="attn_q_norm.weight", k_norm="attn_k_norm.weight")
)
NAMES = {"llama": _LLAMA, "qwen2": _QWEN2, "qwen3": _QWEN3}
"""By `general.architecture`."""

_ENDS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")


def _unpermute(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """`[num_heads * head_dim, in]` from pairs (0, 1), (2, 3), ... to halves (0, d/2), (1, d/2 + 1), ..."""
    num_out, num_in = weight.shape
    pairs = weight.view(num_heads, num_out // num_heads // 2, 2, num_in)
    return pairs.transpose(1, 2).reshape(num_out, num_in)


class GgufModel:
    """A model in one GGUF file, opened but not read."""

    def __init__(self, path: Path, name: str) -> None:
        """Raises ModelLoadError when the file is damaged or holds a model that is not supported."""
        self._file = GgufFile(path)
        architecture = self._file.metadata.get("general.architecture")
        if architecture not in NAMES:
            raise ModelLoadError(f"{path}: architecture {architecture!r} is not supported ({', '.join(NAMES)} are)")
        self._names = NAMES[str(architecture)]
        self.spec = self._read_spec(name, str(architecture))

    def _read_spec(self, name: str, family: str) -> ModelSpec:
        file, prefix = self._file, f"{family}."
        config = ConfigFields({key: v for key, v in file.metadata.items() if key.startswith(prefix)}, file.path)
        hidden = config.integer(prefix + "embedding_length")
        heads = config.integer(prefix + "attention.head_count")
        num_layers = config.integer(prefix + "block_count")
        head_dim = self._head_dim(config, prefix, hidden // max(heads, 1))
        spec = ModelSpec(
            name=name,
            family=family,
            num_layers=num_layers,
            hidden_size=hidden,
            intermediate_size=config.integer(prefix + "feed_forward_length"),
            num_heads=heads,
            num_kv_heads=config.integer(prefix + "attention.head_count_kv", heads),
            head_dim=head_dim,
            vocab_size=self._vocab_size(),
            max_context_tokens=config.integer(prefix + "context_length"),
            rms_norm_eps=config.number(prefix + "attention.layer_norm_rms_epsilon"),
            tie_word_embeddings=self._names.lm_head not in file.tensors,
            eos_token_ids=tuple(sorted({int(file.metadata[key]) for key in _ENDS if key in file.metadata})),
            weights_digest=self._digest(),
            ropes=(_rope(config, prefix),),
            layers=(LayerSpec(),) * num_layers,
            attention_scale=head_dim**-0.5,
        )
        config.ignore(prefix + "vocab_size")
        config.refuse_rest()
        return spec

    @staticmethod
    def _head_dim(config: ConfigFields, prefix: str, default: int) -> int:
        """Keys, values and what is rotated must be as wide as each other."""
        head_dim = config.integer(prefix + "attention.key_length", default)
        for key in ("attention.value_length", "rope.dimension_count"):
            if (found := config.integer(prefix + key, head_dim)) != head_dim:
                raise config.unsupported(prefix + key, found, f"{head_dim} is, the width of a key")
        return head_dim

    def _vocab_size(self) -> int:
        embedding = self._file.tensors.get(self._names.embedding)
        if embedding is None or len(embedding.shape) != 2:
            raise ModelLoadError(f"{self._file.path}: tensor {self._names.embedding} is missing")
        return embedding.shape[0]

    def _digest(self) -> str:
        spans = [Span(0, self._file.header_bytes)]
        for tensor in self._file.tensors.values():
            spans.extend(Span.ends_of(tensor.offset, tensor.num_bytes))
        return sampled_digest([(memoryview(self._file.data), spans)])

    def _read(
        self, name: str, shape: tuple[int, ...], *, rows: range | None = None, columns: range | None = None
    ) -> torch.Tensor:
        """See `Reader`."""
        found = self._file.tensors.get(name)
        if found is not None:
            check_shape(self._file.path, name, found.shape, shape)
        weight = self._file.read(name, rows=rows, columns=columns)
        is_query, is_key = (name.endswith(f".{part}.weight") for part in ("attn_q", "attn_k"))
        if self.spec.family != "llama" or not (is_query or is_key):
            return weight
        return _unpermute(weight, weight.shape[0] // self.spec.head_dim)

    def load(self, dtype: torch.dtype, shard: ModelShard, device: torch.device = HOST) -> Weights:
        """Reads and dequantizes what a rank needs. Raises ModelLoadError naming file and tensor."""
        frequencies = rotary_frequencies(self.spec.ropes[0], self.spec.head_dim)
        if "rope_freqs.weight" in self._file.tensors:  # Llama 3's scaling comes as divisors
            divisors = self._file.read("rope_freqs.weight")
            frequencies = RotaryFrequencies(frequencies.inverse / divisors, frequencies.scale)
        source = TensorSource(read=self._read, names=self._names)
        return Assembler(shard, source, dtype, device=device).weights((frequencies,))


def _rope(config: ConfigFields, prefix: str) -> RopeSpec:
    theta = config.number(prefix + "rope.freq_base", 10000.0)
    kind = config.choice(prefix + "rope.scaling.type", ["none", "linear"], "none")
    if kind == "none":
        config.ignore(*(f"{prefix}rope.scaling.{key}" for key in ("factor", "original_context_length", "finetuned")))
        return RopeSpec(theta=theta)
    config.ignore(*(f"{prefix}rope.scaling.{key}" for key in ("original_context_length", "finetuned")))
    return RopeSpec(theta=theta, scaling=LinearScaling(factor=config.number(prefix + "rope.scaling.factor")))
