"""Where proto and types meet: requests and sampling parameters to and from the worker API's messages.

Everything that comes off the wire is checked here once; a wrong value is an InvalidRequest that names the field.
Deadlines travel as seconds left, never as times: `now` is the holder's own monotonic clock, in seconds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Literal

from tandem.errors import DeadlineExceeded, InvalidRequest
from tandem.kv.hashing import HASH_BYTES
from tandem.rpc.tandem.v1 import common_pb2, worker_pb2
from tandem.types import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_PRIORITY,
    BlockHash,
    FinishReason,
    Grammar,
    GrammarKind,
    HandoffId,
    PromptPrefix,
    Request,
    RequestId,
    SamplingParams,
    TokenLogprobs,
    TokenStep,
)

_TO_PROTO: dict[FinishReason | None, common_pb2.FinishReason.ValueType] = {
    None: common_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.TOOL_CALLS: common_pb2.FINISH_REASON_TOOL_CALLS,
}
_FROM_PROTO: dict[int, FinishReason | None] = {value: reason for reason, value in _TO_PROTO.items()}
_HANDOFF_ID = re.compile(r"[0-9a-f]{32}")


def finish_reason_to_proto(reason: FinishReason | None) -> common_pb2.FinishReason.ValueType:
    """None becomes UNSPECIFIED."""
    return _TO_PROTO[reason]


def finish_reason_from_proto(value: int) -> FinishReason | None:
    """UNSPECIFIED becomes None. Raises InvalidRequest for values that this version does not know."""
    _require(value in _FROM_PROTO, "finish_reason", value, "a value of tandem.v1.FinishReason")
    return _FROM_PROTO[value]


def sampling_to_proto(sampling: SamplingParams) -> worker_pb2.ResolvedSampling:
    """Numbers travel as they are, in 64 bits: both pools compute with the same ones."""
    return worker_pb2.ResolvedSampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        stop_token_ids=sampling.stop_token_ids,
        min_tokens=sampling.min_tokens,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        bias_token_ids=[token_id for token_id, _ in sampling.logit_bias],
        biases=[bias for _, bias in sampling.logit_bias],
        num_logprobs=sampling.num_logprobs,
        num_prompt_logprobs=sampling.num_prompt_logprobs,
        grammar=None if sampling.grammar is None else _grammar_to_proto(sampling.grammar),
    )


def sampling_from_proto(message: worker_pb2.ResolvedSampling) -> SamplingParams:
    """Inverse of `sampling_to_proto`. Raises InvalidRequest for values outside their bounds."""
    _require_between("temperature", message.temperature, 0, 2)
    _require(0 < message.top_p <= 1, "top_p", message.top_p, "more than 0 and at most 1")
    _require(message.top_k >= 0, "top_k", message.top_k, "0 or more")
    _require_between("min_p", message.min_p, 0, 1)
    _require(message.max_tokens >= 1, "max_tokens", message.max_tokens, "1 or more")
    _require_between("min_tokens", message.min_tokens, 0, message.max_tokens)
    _require_between("presence_penalty", message.presence_penalty, -2, 2)
    _require_between("frequency_penalty", message.frequency_penalty, -2, 2)
    penalty = message.repetition_penalty
    _require(0 < penalty <= 10, "repetition_penalty", penalty, "more than 0 and at most 10")
    return SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        seed=message.seed,
        max_tokens=message.max_tokens,
        stop_token_ids=_token_ids(message.stop_token_ids, "stop_token_ids"),
        min_tokens=message.min_tokens,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=penalty,
        logit_bias=_bias_from_proto(message),
        num_logprobs=_num_logprobs(message, "num_logprobs"),
        num_prompt_logprobs=_num_logprobs(message, "num_prompt_logprobs"),
        grammar=_grammar_from_proto(message.grammar) if message.HasField("grammar") else None,
    )


def _bias_from_proto(message: worker_pb2.ResolvedSampling) -> tuple[tuple[int, float], ...]:
    ids = _token_ids(message.bias_token_ids, "bias_token_ids")
    _require(len(ids) == len(message.biases) == len(set(ids)), "bias_token_ids", ids, "as many as biases, each once")
    for bias in message.biases:
        _require_between("biases", bias, -100, 100)
    return tuple(zip(ids, message.biases, strict=True))


def _num_logprobs(
    message: worker_pb2.ResolvedSampling, name: Literal["num_logprobs", "num_prompt_logprobs"]
) -> int | None:
    if not message.HasField(name):
        return None
    count: int = getattr(message, name)
    _require_between(name, count, 0, MAX_LOGPROBS)
    return count


def _grammar_to_proto(grammar: Grammar) -> worker_pb2.ResolvedGrammar:
    return worker_pb2.ResolvedGrammar(kind=grammar.kind, text=grammar.text)


def _grammar_from_proto(message: worker_pb2.ResolvedGrammar) -> Grammar:
    kinds = [str(kind) for kind in GrammarKind]
    _require(message.kind in kinds, "grammar.kind", message.kind, "one of " + ", ".join(kinds))
    return Grammar(kind=GrammarKind(message.kind), text=message.text)


def logprobs_to_proto(logprobs: TokenLogprobs) -> common_pb2.TokenLogprobs:
    """Log-probabilities travel as 32-bit floats, which they are."""
    return common_pb2.TokenLogprobs(
        logprob=logprobs.logprob, top_ids=logprobs.top_ids, top_logprobs=logprobs.top_logprobs
    )


def logprobs_from_proto(message: common_pb2.TokenLogprobs) -> TokenLogprobs:
    """Inverse of `logprobs_to_proto`. Raises InvalidRequest when ids and values are not equally many."""
    num_ids = len(message.top_ids)
    _require(num_ids == len(message.top_logprobs), "top_ids", num_ids, "as many as top_logprobs")
    return TokenLogprobs(
        logprob=message.logprob,
        top_ids=_token_ids(message.top_ids, "top_ids"),
        top_logprobs=tuple(message.top_logprobs),
    )


def first_token_to_proto(step: TokenStep) -> worker_pb2.FirstToken:
    """A choice's first token; its position is 0."""
    return worker_pb2.FirstToken(
        token_id=step.token_id,
        finish_reason=finish_reason_to_proto(step.finish_reason),
        choice=step.choice,
        logprobs=None if step.logprobs is None else logprobs_to_proto(step.logprobs),
    )


def first_token_from_proto(message: worker_pb2.FirstToken) -> TokenStep:
    """Inverse of `first_token_to_proto`. Raises InvalidRequest."""
    return _step_from_proto(message, 0)


def decoded_token_to_proto(step: TokenStep) -> worker_pb2.DecodedToken:
    """A token from the decode leg."""
    return worker_pb2.DecodedToken(
        position=step.position,
        token_id=step.token_id,
        finish_reason=finish_reason_to_proto(step.finish_reason),
        choice=step.choice,
        logprobs=None if step.logprobs is None else logprobs_to_proto(step.logprobs),
    )


def decoded_token_from_proto(message: worker_pb2.DecodedToken) -> TokenStep:
    """Inverse of `decoded_token_to_proto`. Raises InvalidRequest."""
    return _step_from_proto(message, message.position)


def _step_from_proto(message: worker_pb2.FirstToken | worker_pb2.DecodedToken, position: int) -> TokenStep:
    _require_between("choice", message.choice, 0, MAX_CHOICES - 1)
    return TokenStep(
        position=position,
        token_id=message.token_id,
        finish_reason=finish_reason_from_proto(message.finish_reason),
        choice=message.choice,
        logprobs=logprobs_from_proto(message.logprobs) if message.HasField("logprobs") else None,
    )


def handoff_id_from_wire(text: str) -> HandoffId:
    """Raises InvalidRequest unless it is 32 lower-case hex digits."""
    _require(_HANDOFF_ID.fullmatch(text) is not None, "handoff_id", text, "32 lower-case hex digits")
    return HandoffId(text)


def prefill_request_to_proto(
    request: Request, *, now: float, handoff: worker_pb2.HandoffTarget | None
) -> worker_pb2.PrefillRequest:
    """The prefill leg of `request`. Raises DeadlineExceeded when no time is left."""
    return worker_pb2.PrefillRequest(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling=sampling_to_proto(request.sampling),
        handoff=handoff,
        timeout_s=_seconds_left(request, now),
        num_choices=request.num_choices,
        prefix=_prefix_to_proto(request.prefix),
        priority=request.priority,
    )


def decode_request_to_proto(request: Request, *, now: float, handoff_id: HandoffId) -> worker_pb2.DecodeRequest:
    """The decode leg of `request`. Raises DeadlineExceeded when no time is left."""
    return worker_pb2.DecodeRequest(
        request_id=request.request_id,
        handoff_id=handoff_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling=sampling_to_proto(request.sampling),
        timeout_s=_seconds_left(request, now),
        num_choices=request.num_choices,
        prefix=_prefix_to_proto(request.prefix),
        priority=request.priority,
    )


def _prefix_to_proto(prefix: PromptPrefix | None) -> worker_pb2.PromptPrefix | None:
    if prefix is None:
        return None
    return worker_pb2.PromptPrefix(root=prefix.root, blocks=b"".join(prefix.blocks), tenant=prefix.tenant)


def _prefix_from_proto(message: worker_pb2.PromptPrefix, *, num_prompt_tokens: int) -> PromptPrefix:
    """How many tokens a block has is the worker's to know: see `check_prefix`."""
    _require(len(message.root) == HASH_BYTES, "prefix.root", message.root, f"{HASH_BYTES} bytes")
    num_bytes = len(message.blocks)
    most = num_prompt_tokens * HASH_BYTES
    _require(num_bytes % HASH_BYTES == 0 and num_bytes <= most, "prefix.blocks", num_bytes, f"{HASH_BYTES} bytes each")
    names = (message.blocks[at : at + HASH_BYTES] for at in range(0, num_bytes, HASH_BYTES))
    return PromptPrefix(root=BlockHash(message.root), blocks=tuple(map(BlockHash, names)), tenant=message.tenant)


def check_prefix(request: Request, block_size: int) -> None:
    """Raises InvalidRequest unless each full block of the prompt has a name, or nothing has."""
    if request.prefix is not None:
        num_full = len(request.prompt_token_ids) // block_size
        _require(len(request.prefix.blocks) == num_full, "prefix.blocks", len(request.prefix.blocks), f"{num_full}")


def prefill_request_from_proto(message: worker_pb2.PrefillRequest, *, now: float) -> Request:
    """What a prefill worker computes; it arrived `now`. Raises InvalidRequest; the handoff target is checked too."""
    if message.HasField("handoff"):
        handoff_id_from_wire(message.handoff.handoff_id)
        _require(bool(message.handoff.decode_address), "handoff.decode_address", "", "host:port")
    return _request_from_proto(message, now)


def decode_request_from_proto(message: worker_pb2.DecodeRequest, *, now: float) -> Request:
    """What a decode worker computes; it arrived `now`. Raises InvalidRequest; the handoff id is checked too."""
    handoff_id_from_wire(message.handoff_id)
    return _request_from_proto(message, now)


def _request_from_proto(message: worker_pb2.PrefillRequest | worker_pb2.DecodeRequest, now: float) -> Request:
    _require(bool(message.request_id), "request_id", message.request_id, "set")
    _require(len(message.prompt_token_ids) > 0, "prompt_token_ids", [], "at least one token id")
    _require_between("num_choices", message.num_choices, 1, MAX_CHOICES)
    _require_between("priority", message.priority, -MAX_PRIORITY, MAX_PRIORITY)
    timeout_s = message.timeout_s
    _require(math.isfinite(timeout_s) and timeout_s > 0, "timeout_s", timeout_s, "more than 0 seconds")
    return Request(
        request_id=RequestId(message.request_id),
        prompt_token_ids=_token_ids(message.prompt_token_ids, "prompt_token_ids"),
        sampling=sampling_from_proto(message.sampling),
        arrival_s=now,
        deadline_s=now + timeout_s,
        num_choices=message.num_choices,
        prefix=_prefix_from_proto(message.prefix, num_prompt_tokens=len(message.prompt_token_ids))
        if message.HasField("prefix")
        else None,
        priority=message.priority,
    )


def _token_ids(values: Sequence[int], name: str) -> tuple[int, ...]:
    ids = tuple(values)
    _require(not ids or min(ids) >= 0, name, min(ids, default=0), "0 or more each")
    return ids


def _seconds_left(request: Request, now: float) -> float:
    left_s = request.deadline_s - now
    if left_s <= 0:
        raise DeadlineExceeded(f"the deadline passed {-left_s:.3f} s ago, before the request was sent to a worker")
    return left_s


def _require_between(name: str, value: float, low: float, high: float) -> None:
    _require(low <= value <= high, name, value, f"{low} to {high}")


def _require(ok: bool, name: str, value: object, bound: str) -> None:
    if not ok:
        raise InvalidRequest(f"{name} must be {bound}, got {value!r}", param=name)
