"""What transformers makes of a prompt, in fp32 and greedily: the answers that Tandem must give too.

Answers are kept on disk, keyed by weights, prompt and versions, because the oracle is slow and never changes its mind.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tandem.model.files import ModelFiles
from tandem.model.loader import load_spec


@dataclass(frozen=True, kw_only=True)
class Golden:
    """One prompt's answer. `tokens` go on past end-of-sequence; `logits` `[vocab]` are the prompt's last row."""

    tokens: tuple[int, ...]
    logits: torch.Tensor


class Oracle:
    """A transformers model, loaded only when an answer is not on disk yet."""

    def __init__(self, files: ModelFiles, directory: Path, *, attention: str = "sdpa") -> None:
        """`attention` is transformers' own name: `eager` where torch's fused kernel leaves something out."""
        self._files = files
        self._directory = directory
        self._attention = attention
        self._identity = [load_spec(files).weights_digest, transformers.__version__, torch.__version__]

    @cached_property
    def model(self) -> Any:
        """The transformers model, fp32."""
        weights = self._files.weights[0]
        source = {"gguf_file": weights.name} if self._files.kind == "gguf" else {}
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            weights.parent, dtype=torch.float32, attn_implementation=self._attention, **source
        )
        return loaded.eval()

    def answer(self, prompt_ids: Sequence[int], max_tokens: int) -> Golden:
        """The greedy continuation, exactly `max_tokens` long, and the logits that its first token came from."""
        key = json.dumps([*self._identity, list(prompt_ids), max_tokens]).encode()
        stem = self._directory / hashlib.blake2b(key, digest_size=16).hexdigest()
        tokens_path, logits_path = stem.with_suffix(".json"), stem.with_suffix(".npy")
        with self._alone():  # runs side by side do not compute twice, and see answers whole
            if not tokens_path.exists():
                golden = self._compute(prompt_ids, max_tokens)
                np.save(logits_path, golden.logits.numpy())
                tokens_path.write_text(json.dumps(golden.tokens))
        logits = torch.from_numpy(np.load(logits_path))
        return Golden(tokens=tuple(json.loads(tokens_path.read_text())), logits=logits)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with (self._directory / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    @torch.inference_mode()
    def _compute(self, prompt_ids: Sequence[int], max_tokens: int) -> Golden:
        tokens: list[int] = []
        step = self.model(torch.tensor([list(prompt_ids)]), use_cache=True, logits_to_keep=1)
        first = step.logits[0, -1].clone()
        while True:
            tokens.append(int(step.logits[0, -1].argmax()))
            if len(tokens) == max_tokens:
                return Golden(tokens=tuple(tokens), logits=first)
            newest = torch.tensor([tokens[-1:]])
            step = self.model(newest, past_key_values=step.past_key_values, use_cache=True)


def golden_tokens(oracle: Oracle, prompt_ids: Sequence[int], max_tokens: int) -> tuple[int, ...]:
    """The greedy continuation of a prompt, `max_tokens` long whatever end-of-sequence tokens it holds."""
    return oracle.answer(prompt_ids, max_tokens).tokens
