"""What a client may ask: bounds of every field, and the defaults that depend on model and prompt. Pure.

The same checks and messages for gRPC and HTTP; `param` is the field's name in both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from tandem.errors import ContextLengthExceeded, InvalidRequest
from tandem.types import MAX_CHOICES, MAX_LOGPROBS, MAX_PRIORITY, MAX_STOP_STRINGS, Grammar, SamplingParams

MAX_TIMEOUT_S = 86_400.0
MAX_SALT_BYTES = 256
MAX_TOP_K = 2**31 - 1
MIN_SEED, MAX_SEED = -(2**63), 2**64 - 1
"""A negative one stands for the unsigned number of the same 64 bits."""
MAX_BIASED_TOKENS = 1024
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingOptions:
    """What a client said about sampling; None where it said nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    cache_salt: str = ""
    min_p: float | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    """Alternatives to report; None reports nothing."""
    prompt_logprobs: int | None = None
    n: int | None = None
    priority: int | None = None
    grammar: Grammar | None = None
    grammar_field: str = "grammar"
    """What the client's protocol calls the field that `grammar` came from; for messages, as the next ones."""
    logprobs_field: str = "logprobs"
    max_tokens_field: str = "max_tokens"
    """What the client's protocol calls max_tokens; for messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextLimit:
    """Most tokens of prompt and output together. `model_tokens` is what the model could take: more where the pools
    hold less; 0 where that is not known."""

    tokens: int
    model_tokens: int = 0
    block_size: int = 0
    decode_blocks: int = 0
    """Blocks that all outputs of a request share; 0 where that is not known."""

    def tokens_of_each(self, num_choices: int, num_prompt_tokens: int) -> int:
        """Most output tokens of each of several choices; at least 1."""
        if not self.decode_blocks:
            return self.tokens
        num_full = num_prompt_tokens // self.block_size
        blocks_each = (self.decode_blocks - num_full) // num_choices
        return max(1, (num_full + blocks_each) * self.block_size - num_prompt_tokens + 1)

    def __str__(self) -> str:
        if self.model_tokens > self.tokens:
            return (
                f"this cluster's limit of {self.tokens} tokens (the size of its KV pools; the model could take "
                f"{self.model_tokens})"
            )
        return f"the model's context of {self.tokens} tokens"


def check_options(options: SamplingOptions, *, vocab_size: int) -> None:
    """Everything that can be said without the prompt. Raises InvalidRequest that names field, value and bound."""
    _check_number("temperature", options.temperature, low=0.0, high=2.0)
    _check_number("top_p", options.top_p, low=0.0, high=1.0, open_low=True)
    _check_number("top_k", options.top_k, low=-1, high=MAX_TOP_K)
    _check_number("seed", options.seed, low=MIN_SEED, high=MAX_SEED)
    _check_number(options.max_tokens_field, options.max_tokens, low=1, high=math.inf)
    _check_number("min_p", options.min_p, low=0.0, high=1.0)
    _check_number("min_tokens", options.min_tokens, low=0, high=math.inf)
    _check_number("presence_penalty", options.presence_penalty, low=-2.0, high=2.0)
    _check_number("frequency_penalty", options.frequency_penalty, low=-2.0, high=2.0)
    _check_number("repetition_penalty", options.repetition_penalty, low=0.0, high=10.0, open_low=True)
    _check_number(options.logprobs_field, options.logprobs, low=0, high=MAX_LOGPROBS)
    _check_number("prompt_logprobs", options.prompt_logprobs, low=0, high=MAX_LOGPROBS)
    _check_number("n", options.n, low=1, high=MAX_CHOICES)
    _check_number("priority", options.priority, low=-MAX_PRIORITY, high=MAX_PRIORITY)
    _check_bias(options.logit_bias, vocab_size=vocab_size)
    _check_stop(options.stop)
    _check_salt(options.cache_salt)
    check_token_ids(options.stop_token_ids, vocab_size=vocab_size, param="stop_token_ids")
    check_together(options)


def _check_salt(salt: str) -> None:
    if salt:
        check_text(salt, param="cache_salt")
    if len(salt.encode()) > MAX_SALT_BYTES:
        raise InvalidRequest(f"cache_salt must be at most {MAX_SALT_BYTES} bytes", param="cache_salt")


def _check_bias(logit_bias: Sequence[tuple[int, float]], *, vocab_size: int) -> None:
    if len(logit_bias) > MAX_BIASED_TOKENS:
        raise InvalidRequest(
            f"logit_bias must be at most {MAX_BIASED_TOKENS} tokens, got {len(logit_bias)}", param="logit_bias"
        )
    for token_id, bias in logit_bias:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"logit_bias: token ids must be 0 to {vocab_size - 1} (the vocabulary), got {token_id}",
                param="logit_bias",
            )
        if not -100 <= bias <= 100:
            raise InvalidRequest(f"logit_bias[{token_id}] must be -100 to 100, got {bias!r}", param="logit_bias")


def check_together(options: SamplingOptions) -> None:
    """Raises InvalidRequest for what contradicts itself."""
    if options.grammar is None:
        return
    what = options.grammar_field
    if options.ignore_eos:
        why = f"ignore_eos does not go with {what}: the output ends when it is complete"
        raise InvalidRequest(why, param="ignore_eos")
    if options.min_tokens:
        raise InvalidRequest(f"min_tokens does not go with {what}: it may be complete earlier", param="min_tokens")


def check_text(text: str, *, param: str) -> None:
    """Raises InvalidRequest for an empty text or one that has no UTF-8 form."""
    if not text:
        raise InvalidRequest(f"{param} is empty", param=param)
    if (bad := _SURROGATE.search(text)) is not None:
        raise InvalidRequest(f"{param} holds a lone surrogate at character {bad.start()}", param=param)


def check_token_ids(token_ids: Sequence[int], *, vocab_size: int, param: str) -> None:
    """Raises InvalidRequest for an id outside the vocabulary."""
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    at, bad = next((i, t) for i, t in enumerate(token_ids) if not 0 <= t < vocab_size)
    raise InvalidRequest(f"{param}[{at}] must be 0 to {vocab_size - 1} (the vocabulary), got {bad}", param=param)


def check_request_id(request_id: str) -> None:
    """Raises InvalidRequest unless it is 1 to 128 printable ASCII characters without spaces."""
    if not _REQUEST_ID.fullmatch(request_id):
        raise InvalidRequest(
            f"request_id must be 1 to 128 printable ASCII characters without spaces, got {request_id[:140]!r}",
            param="request_id",
        )


def resolve_timeout(timeout_s: float | None, *, default_s: float) -> float:
    """Seconds that the request may take; None and 0 take the default. Raises InvalidRequest."""
    _check_number("timeout_s", timeout_s, low=0.0, high=MAX_TIMEOUT_S)
    return timeout_s or default_s


def resolve_sampling(
    options: SamplingOptions,
    *,
    num_prompt_tokens: int,
    context: ContextLimit,
    eos_token_ids: Iterable[int],
    random_seed: int,
) -> SamplingParams:
    """Applies the defaults; `options` were checked. Raises ContextLengthExceeded, InvalidRequest for an empty prompt.

    Without max_tokens the output may fill what the context leaves after the prompt; several outputs share the blocks
    of a decode worker.
    """
    if num_prompt_tokens == 0:
        raise InvalidRequest("prompt is empty", param="prompt")
    left = context.tokens - num_prompt_tokens
    if left < 1:
        raise ContextLengthExceeded(
            f"the prompt has {num_prompt_tokens} tokens and leaves no room for an answer in {context}; shorten the "
            f"prompt to at most {context.tokens - 1} tokens",
            param="prompt",
        )
    num_choices = options.n or 1
    max_tokens = options.max_tokens
    if max_tokens is None:
        max_tokens = left if num_choices == 1 else min(left, context.tokens_of_each(num_choices, num_prompt_tokens))
    if max_tokens > left:
        name = options.max_tokens_field
        raise ContextLengthExceeded(
            f"{num_prompt_tokens} prompt token{'' if num_prompt_tokens == 1 else 's'} plus {name}={max_tokens} exceed "
            f"{context}; lower {name} to at most {left} or shorten the prompt",
            param=name,
        )
    _check_number("min_tokens", options.min_tokens, low=0, high=max_tokens)
    stops = options.stop_token_ids if options.ignore_eos else chain(options.stop_token_ids, eos_token_ids)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if options.temperature is None else options.temperature,
        top_p=1.0 if options.top_p is None else options.top_p,
        top_k=max(0, options.top_k or 0),
        min_p=options.min_p or 0.0,
        seed=random_seed if options.seed is None else options.seed & MAX_SEED,
        stop_token_ids=tuple(sorted(set(stops))),
        min_tokens=options.min_tokens or 0,
        presence_penalty=options.presence_penalty or 0.0,
        frequency_penalty=options.frequency_penalty or 0.0,
        repetition_penalty=1.0 if options.repetition_penalty is None else options.repetition_penalty,
        logit_bias=tuple(sorted(options.logit_bias)),
        num_logprobs=options.logprobs,
        num_prompt_logprobs=options.prompt_logprobs,
        grammar=options.grammar,
    )


def _check_stop(stop: Sequence[str]) -> None:
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"stop must be at most {MAX_STOP_STRINGS} strings, got {len(stop)}", param="stop")
    for text in stop:
        check_text(text, param="stop")


def _check_number(name: str, value: float | None, *, low: float, high: float, open_low: bool = False) -> None:
    """`high` may be infinite, a value may not."""
    if value is None or (low < value <= high and value != math.inf) or (value == low and not open_low):
        return
    if open_low:
        bound = f"more than {low} and at most {high}"
    else:
        bound = f"{low} or more" if high == math.inf else f"{low} to {high}"
    raise InvalidRequest(f"{name} must be {bound}, got {value!r}", param=name)
