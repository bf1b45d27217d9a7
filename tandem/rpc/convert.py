"""Where proto and types meet: requests and sampling parameters to and from the worker API's messages.

Everything that comes off the wire is checked here once; a wrong value is an InvalidRequest that names the field.
Deadlines travel as seconds left, never as times: `now` is the holder's own monotonic clock, in seconds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from tandem.errors import DeadlineExceeded, InvalidRequest
from tandem.rpc.tandem.v1 import common_pb2, worker_pb2
from tandem.types import FinishReason, HandoffId, Request, RequestId, SamplingParams

_TO_PROTO: dict[FinishReason | None, common_pb2.FinishReason.ValueType] = {
    None: common_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
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
    """temperature and top_p travel as 32-bit floats."""
    return worker_pb2.ResolvedSampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        stop_token_ids=sampling.stop_token_ids,
    )


def sampling_from_proto(message: worker_pb2.ResolvedSampling) -> SamplingParams:
    """Inverse of `sampling_to_proto`. Raises InvalidRequest for values outside their bounds."""
    _require(0 <= message.temperature <= 2, "temperature", message.temperature, "0 to 2")
    _require(0 < message.top_p <= 1, "top_p", message.top_p, "more than 0 and at most 1")
    _require(message.top_k >= 0, "top_k", message.top_k, "0 or more")
    _require(message.max_tokens >= 1, "max_tokens", message.max_tokens, "1 or more")
    return SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        seed=message.seed,
        max_tokens=message.max_tokens,
        stop_token_ids=_token_ids(message.stop_token_ids, "stop_token_ids"),
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
    )


def decode_request_to_proto(request: Request, *, now: float, handoff_id: HandoffId) -> worker_pb2.DecodeRequest:
    """The decode leg of `request`. Raises DeadlineExceeded when no time is left."""
    return worker_pb2.DecodeRequest(
        request_id=request.request_id,
        handoff_id=handoff_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling=sampling_to_proto(request.sampling),
        timeout_s=_seconds_left(request, now),
    )


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
    timeout_s = message.timeout_s
    _require(math.isfinite(timeout_s) and timeout_s > 0, "timeout_s", timeout_s, "more than 0 seconds")
    return Request(
        request_id=RequestId(message.request_id),
        prompt_token_ids=_token_ids(message.prompt_token_ids, "prompt_token_ids"),
        sampling=sampling_from_proto(message.sampling),
        arrival_s=now,
        deadline_s=now + timeout_s,
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


def _require(ok: bool, name: str, value: object, bound: str) -> None:
    if not ok:
        raise InvalidRequest(f"{name} must be {bound}, got {value!r}", param=name)
