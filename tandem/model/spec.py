"""What a model is, as numbers: shape, context, special tokens, and the fingerprint that workers must share. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tandem.errors import ContextLengthExceeded, InvalidRequest
from tandem.kv.layout import Dtype, KvLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A decoder of the Llama family (RMSNorm, rotary positions, grouped-query attention, SwiGLU)."""

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context_tokens: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    weights_digest: str
    """Hash of the weight files' identity; two workers with equal digests hold the same weights."""

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
    """32 hex digits; equal only for workers that may exchange KV (same weights, shape, block size and dtype)."""
    text = json.dumps([asdict(spec), asdict(layout)], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16, person=b"tandem-compat").hexdigest()
