"""The words of the system as types: requests, sampling parameters, tokens and ids. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)
HandoffId = NewType("HandoffId", str)
"""32 lower-case hex digits; drawn by the router, unique for each attempt."""
BlockId = NewType("BlockId", int)
"""Index of a block in one worker's KV cache."""
Epoch = NewType("Epoch", int)
"""Incarnation number of a worker; larger for every later start in the cluster."""
BlockHash = NewType("BlockHash", bytes)
"""Name of a full block's content and everything before it, 16 bytes; see `tandem/kv/hashing.py`."""

MAX_STOP_STRINGS = 16


class Role(StrEnum):
    """Which pool a worker belongs to."""

    PREFILL = "prefill"
    DECODE = "decode"


class FinishReason(StrEnum):
    """Why an output ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to end; every default is resolved, nothing is optional.

    `stop_token_ids` holds the model's end-of-sequence ids too, unless the client asked to ignore them.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()

    def finish_reason(self, token_id: int, position: int) -> FinishReason | None:
        """Whether the output ends with `token_id` at output `position` (first token: 0), and why.

        The one place where token-level finish rules live: both pools call it.
        """
        if token_id in self.stop_token_ids:
            return FinishReason.STOP
        if position + 1 >= self.max_tokens:
            return FinishReason.LENGTH
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What the client asked, validated and tokenized. `deadline_s` is on the holder's own monotonic clock."""

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_s: float
    deadline_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenStep:
    """One output token. `position` is its index in the output (first token: 0)."""

    position: int
    token_id: int
    finish_reason: FinishReason | None
