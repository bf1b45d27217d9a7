"""The words of the system as types: requests, sampling parameters, tokens and ids. Pure."""

from __future__ import annotations

import hashlib
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
MAX_LOGPROBS = 20
"""Most alternatives reported for one token."""
MAX_CHOICES = 128
MAX_PRIORITY = 100
"""Priorities are from minus this to this."""
PRIORITY_S = 5.0
"""Seconds of waiting that each level of priority is worth."""


class Role(StrEnum):
    """Which pool a worker belongs to."""

    PREFILL = "prefill"
    DECODE = "decode"


class FinishReason(StrEnum):
    """Why an output ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    """Given by the router alone: an output that ended by itself and holds calls."""


class GrammarKind(StrEnum):
    """How a grammar's text is to be read."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"
    STRUCTURAL_TAG = "structural_tag"
    """xgrammar's JSON description of tagged parts; what tool calls are made of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grammar:
    """What an output must match as a whole."""

    kind: GrammarKind
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to end; every default is resolved, nothing is optional.

    `stop_token_ids` holds the model's end-of-sequence ids too, unless the client asked to ignore them. `seed` is the
    request's; a choice's own is `choice_seed`.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    """Stop tokens cannot be chosen at earlier output positions than this."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit), by id."""
    num_logprobs: int | None = None
    """Alternatives to report for each output token; 0 reports the token itself alone, None nothing."""
    num_prompt_logprobs: int | None = None
    """The same for each prompt token after the first."""
    grammar: Grammar | None = None

    @property
    def needs_history(self) -> bool:
        """Whether a choice depends on which tokens there were before."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def is_plain(self) -> bool:
        """Whether logits are used as the model gives them."""
        return not (self.needs_history or self.logit_bias or self.min_tokens or self.grammar)

    def finish_reason(self, token_id: int, position: int) -> FinishReason | None:
        """Whether the output ends with `token_id` at output `position` (first token: 0), and why.

        The one place where token-level finish rules live: both pools call it.
        """
        if token_id in self.stop_token_ids and position >= self.min_tokens:
            return FinishReason.STOP
        if position + 1 >= self.max_tokens:
            return FinishReason.LENGTH
        return None


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one of a request's choices: the first has the request's own, so that n=1 gives the first of n.

    Others have 64 bits of BLAKE2b over seed and index (each 8 bytes, little-endian).
    """
    if choice == 0:
        return seed
    text = seed.to_bytes(8, "little") + choice.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, person=b"tandem-choice").digest(), "little")


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptPrefix:
    """Names of a prompt's full blocks, made once by the router; see `tandem/kv/hashing.py`."""

    root: BlockHash
    """Parent of the first block: model, tokenizer and salt."""
    blocks: tuple[BlockHash, ...]
    tenant: str = ""
    """Whose quota in the store they count against."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What the client asked, validated and tokenized. `deadline_s` is on the holder's own monotonic clock."""

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_s: float
    deadline_s: float
    num_choices: int = 1
    """Outputs to give for the one prompt, which is prefilled and handed over once."""
    cache_salt: str = ""
    """Prompts share cached blocks only with those of the same salt."""
    prefix: PromptPrefix | None = None
    """What the prompt's blocks are called; None: they are neither looked for nor kept."""
    priority: int = 0
    """Lower ones come first: each level counts like `PRIORITY_S` seconds of waiting."""

    @property
    def order_s(self) -> float:
        """When it would have arrived with priority 0 to stand where it does; seconds on the clock of `arrival_s`."""
        return self.arrival_s + self.priority * PRIORITY_S


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprobs:
    """How likely the model found a token where it stands, before penalties, bias, grammar and temperature.

    `top_ids` are the most likely tokens there, most likely first, with their `top_logprobs`.
    """

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledToken:
    """One token that was chosen."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenStep:
    """One output token. `position` is its index in the output of its choice (first token: 0)."""

    position: int
    token_id: int
    finish_reason: FinishReason | None
    choice: int = 0
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptScores:
    """What the model thought of the prompt: an entry for each of its tokens after the first."""

    logprobs: tuple[TokenLogprobs, ...]
