"""Makers of values for tests: every field has a default, name only what the test is about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from router.view import WorkerView
from tandem.kv.hashing import CacheIdentity, block_hashes, root_hash
from tandem.secret import ClusterKey
from tandem.types import (
    Epoch,
    FinishReason,
    PromptPrefix,
    Request,
    RequestId,
    Role,
    SampledToken,
    SamplingParams,
    TokenStep,
    WorkerId,
)


def make_sampling(**changes: Any) -> SamplingParams:
    """Greedy, four tokens, no stop tokens."""
    return SamplingParams(**{"max_tokens": 4, "temperature": 0.0, **changes})


def make_prefix(token_ids: Sequence[int], *, block_size: int = 4, salt: str = "") -> PromptPrefix:
    """What the router would call a prompt's blocks."""
    root = root_hash(CacheIdentity(fingerprint="tests", salt=salt))
    return PromptPrefix(root=root, blocks=block_hashes(root, token_ids, block_size), tenant=salt)


def make_request(
    request_id: str = "r0",
    *,
    num_prompt_tokens: int = 5,
    num_choices: int = 1,
    salt: str | None = None,
    arrival_s: float = 0.0,
    priority: int = 0,
    **sampling: Any,
) -> Request:
    """A prompt of tokens 0, 1, 2, ...; with a salt its blocks of 4 tokens have names."""
    token_ids = tuple(range(num_prompt_tokens))
    return Request(
        request_id=RequestId(request_id),
        prompt_token_ids=token_ids,
        prefix=None if salt is None else make_prefix(token_ids, salt=salt),
        sampling=make_sampling(**sampling),
        arrival_s=arrival_s,
        deadline_s=1e9,
        num_choices=num_choices,
        priority=priority,
    )


def make_first(*token_ids: int, finish_reasons: Mapping[int, FinishReason] | None = None) -> tuple[TokenStep, ...]:
    """The first tokens of a request's choices; those named in `finish_reasons` end with them."""
    reasons = finish_reasons or {}
    return tuple(
        TokenStep(position=0, token_id=token_id, finish_reason=reasons.get(choice), choice=choice)
        for choice, token_id in enumerate(token_ids)
    )


def sampled(*token_ids: int) -> list[SampledToken]:
    """Tokens as an executor gives them, without log-probabilities."""
    return [SampledToken(token_id=token_id) for token_id in token_ids]


def make_worker_view(worker_id: str, role: Role, **changes: Any) -> WorkerView:
    """An idle worker with 64 blocks of 16 tokens."""
    values: dict[str, Any] = {
        "address": f"127.0.0.1:{sum(worker_id.encode())}",
        "epoch": Epoch(1),
        "fingerprint": "same",
        "transport": "shm",
        "node": "host",
        "model": "m",
        "max_context_tokens": 1024,
        "num_blocks": 64,
        "block_size": 16,
        "num_waiting_tokens": 0,
        "num_used_blocks": 0,
        "num_requests": 0,
    }
    return WorkerView(worker_id=WorkerId(worker_id), role=role, **{**values, **changes})


CLUSTER_KEY = ClusterKey(bytes(range(32)))
"""That of every cluster which tests make by hand."""
