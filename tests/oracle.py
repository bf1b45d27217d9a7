"""What transformers makes of a prompt, in fp32 and greedily: the answers that Tandem must give too."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import takewhile
from typing import Any

import torch
import transformers

from tandem.model.files import ModelFiles


class Oracle:
    """A transformers model, loaded when it is first asked."""

    def __init__(self, files: ModelFiles, *, attention: str = "sdpa") -> None:
        """`attention` is transformers' own name: `eager` where torch's fused kernel leaves something out."""
        self._files = files
        self._attention = attention
        self._cached_ids: list[int] = []
        self._cache: Any = transformers.DynamicCache()

    @cached_property
    def model(self) -> Any:
        """The transformers model, fp32."""
        weights = self._files.weights[0]
        source = {"gguf_file": weights.name} if self._files.kind == "gguf" else {}
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            weights.parent, dtype=torch.float32, attn_implementation=self._attention, **source
        )
        return loaded.eval()

    @torch.inference_mode()
    def tokens(self, prompt_ids: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        """The greedy continuation, exactly `max_tokens` long whatever end-of-sequence tokens it holds."""
        tokens: list[int] = []
        step = self.model(torch.tensor([list(prompt_ids)]), use_cache=True, logits_to_keep=1)
        while True:
            tokens.append(int(step.logits[0, -1].argmax()))
            if len(tokens) == max_tokens:
                return tuple(tokens)
            newest = torch.tensor([tokens[-1:]])
            step = self.model(newest, past_key_values=step.past_key_values, use_cache=True)

    @torch.inference_mode()
    def follow(self, prompt_ids: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        """The logits `[len(tokens), vocab]` that stand before each token of a continuation.

        One pass shows what `tokens` needs a pass each for: that every token is the likeliest after those before it.
        What a prompt has in common with the one asked about before is not computed again (models without windows).
        """
        ids = [*prompt_ids, *tokens[:-1]]
        same = takewhile(lambda pair: pair[0] == pair[1], zip(self._cached_ids, ids, strict=False))
        num_shared = min(sum(1 for _ in same), len(prompt_ids) - 1)
        if num_gone := len(self._cached_ids) - num_shared:
            self._cache.crop(-num_gone)
        rest = torch.tensor([ids[num_shared:]])
        step = self.model(rest, past_key_values=self._cache, use_cache=True, logits_to_keep=len(tokens))
        self._cached_ids = ids
        return step.logits[0].clone()
