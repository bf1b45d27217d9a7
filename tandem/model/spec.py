"""What a model is, as numbers: shape, layers, positions, special tokens, and the fingerprint that workers must share.

Families (`tandem/model/families/`) fill it in; the forward pass reads nothing else about a model. Pure.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from tandem.errors import ContextLengthExceeded, InvalidRequest, ModelLoadError
from tandem.kv.layout import PAYLOAD_DIGEST, Dtype, KvLayout

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearScaling:
    """Positions divided by `factor`."""

    factor: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama3Scaling:
    """Long wavelengths stretched by `factor`, with a ramp between two bounds in turns per `original_context_tokens`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class YarnScaling:
    """YaRN (Peng et al., arXiv:2309.00071): slow dimensions divided by `factor`, cosines times `attention_factor`."""

    factor: float
    original_context_tokens: int
    attention_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeSpec:
    """One kind of rotary positions."""

    theta: float
    scaling: RopeScaling | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsSpec:
    """The mixture of experts that some layers have in place of the dense MLP."""

    num_experts: int
    num_chosen: int
    """Experts that each token goes to."""
    intermediate_size: int
    """Of one expert."""
    normalised: bool
    """Whether the chosen experts' weights sum to 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSpec:
    """In what one layer may differ from another."""

    window: int | None = None
    """Newest tokens that a token attends to, itself among them; None: all."""
    rope: int | None = 0
    """Which of the model's kinds of positions; None: none at all."""
    has_experts: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A decoder with RMSNorm, grouped-query attention over rotary positions, and a gated MLP or experts."""

    name: str
    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    """Of the dense MLP."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context_tokens: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    weights_digest: str
    """Hash of the weight files' identity; two workers with equal digests hold the same weights."""
    ropes: tuple[RopeSpec, ...]
    layers: tuple[LayerSpec, ...]
    """`num_layers` of them."""
    attention_scale: float
    """What query times key is multiplied by."""
    attention_softcap: float | None = None
    """Scores s become c tanh(s / c)."""
    logit_softcap: float | None = None
    activation: Activation = "silu"
    experts: ExpertsSpec | None = None
    norm_offset: float = 0.0
    """Added to every norm's weights as they are stored."""
    embedding_scale: float = 1.0
    """What a token's embedding is multiplied by on its way in."""

    def __post_init__(self) -> None:
        assert len(self.layers) == self.num_layers
        assert all(layer.rope is None or layer.rope < len(self.ropes) for layer in self.layers)
        if self.num_heads % self.num_kv_heads:
            heads = f"{self.num_kv_heads} KV heads for {self.num_heads} heads"
            raise ModelLoadError(f"{self.name}: {heads} are not supported: the one must be a multiple of the other")
        if self.head_dim % 2:
            raise ModelLoadError(f"{self.name}: heads of the odd width {self.head_dim} are not supported")

    def check_prompt(self, token_ids: Sequence[int]) -> None:
        """Raises InvalidRequest for ids outside the vocabulary, ContextLengthExceeded for more than the context."""
        if len(token_ids) > self.max_context_tokens:
            raise ContextLengthExceeded(
                f"the prompt has {len(token_ids)} tokens, the model's context {self.max_context_tokens}", param="prompt"
            )
        largest = max(token_ids)
        if largest >= self.vocab_size:
            raise InvalidRequest(
                f"token ids must be below {self.vocab_size}, the size of the vocabulary, got {largest}", param="prompt"
            )

    def kv_layout(self, *, block_size: int, dtype: Dtype) -> KvLayout:
        """The KV layout of this model on one rank."""
        return KvLayout(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=block_size,
            dtype=dtype,
        )


def fingerprint(spec: ModelSpec, layout: KvLayout) -> str:
    """32 hex digits; equal only for workers that may exchange KV (same weights, shape, block size, dtype, digest)."""
    text = json.dumps([asdict(spec), asdict(layout), PAYLOAD_DIGEST], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16, person=b"tandem-compat").hexdigest()
