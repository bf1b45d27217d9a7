"""Which prefill worker and which decode worker a request goes to, in one decision. Pure.

A prefill worker costs what it has before the request and what it would have to compute for it, in prompt tokens: blocks
that it has are free, others are worth a share of computing them, by the tier they must come from. A decode worker costs
the share of its blocks that are taken after admission: a prefix that it holds takes none. So a conversation stays where
its prefix is until the load there outweighs it. Predicted TTFT and TBT and links will join as terms of `_cost`.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.view import CachedPrefix, ClusterView, WorkerView
from tandem.errors import WorkerUnavailable
from tandem.types import Request


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """Where a request goes. `decode` is None when nothing will be left to decode."""

    prefill: WorkerView
    decode: WorkerView | None
    num_cached_tokens: int = 0
    """Prompt tokens that the prefill worker is expected not to compute."""
    num_held_blocks: int = 0
    """Blocks of the prompt that the decode worker is expected to hold already."""


EXPECTED_OUTPUT_TOKENS = 256
"""Output that a request is taken to have for balancing, where its max_tokens allows more."""
RETRY_AFTER_S = 5.0
"""What a client is told to wait when no pair is ready."""
LOAD_COST = {"host": 0.05, "disk": 0.3, "remote": 0.3}
"""Of a block's compute: what loading it from a tier is taken to cost. Workers decide by what they measure."""


def no_pair() -> WorkerUnavailable:
    """Why a request cannot be routed."""
    message = "no compatible pair of a prefill and a decode worker is ready"
    return WorkerUnavailable(message, retry_after_s=RETRY_AFTER_S)


def num_decode_blocks(request: Request, block_size: int, *, num_held: int = 0) -> int:
    """Blocks that a request is expected to take on a decode worker which holds the first `num_held` of its prompt.

    Its choices share the prompt's full ones.
    """
    num_prompt_tokens = len(request.prompt_token_ids)
    num_output_tokens = min(request.sampling.max_tokens, EXPECTED_OUTPUT_TOKENS)
    num_shared = num_prompt_tokens // block_size
    num_each = -(-(num_prompt_tokens + num_output_tokens) // block_size)
    return num_shared - min(num_held, num_shared) + request.num_choices * (num_each - num_shared)


def route(view: ClusterView, request: Request, now: float) -> Route:
    """The cheapest compatible pair. Raises WorkerUnavailable when there is none.

    Ties go to fewer requests, then to the smaller id, so that equal views give equal routes.
    """
    pairs = view.pairs()
    if not pairs:
        raise no_pair()
    prefill, decode = min(pairs, key=lambda pair: _cost(view, pair[0], pair[1], request))
    cached = view.cached_at(prefill.worker_id)
    return Route(
        prefill=prefill,
        decode=decode if request.sampling.max_tokens > 1 else None,
        num_cached_tokens=_usable(max(cached.device, cached.host, cached.disk, cached.remote), prefill, request),
        num_held_blocks=view.cached_at(decode.worker_id).device,
    )


def _usable(num_blocks: int, worker: WorkerView, request: Request) -> int:
    """Tokens in leading blocks that need not be computed: at least one must, all where they are scored."""
    if request.sampling.num_prompt_logprobs is not None:
        return 0
    return min(num_blocks, (len(request.prompt_token_ids) - 1) // worker.block_size) * worker.block_size


def _prefill_tokens(worker: WorkerView, cached: CachedPrefix, request: Request) -> float:
    """What the request itself costs there, in tokens computed."""
    known = _usable(cached.device, worker, request)
    tokens = float(len(request.prompt_token_ids) - known)
    for tier, count in (("host", cached.host), ("disk", cached.disk), ("remote", cached.remote)):
        reached = max(known, _usable(count, worker, request))
        tokens -= (reached - known) * (1.0 - LOAD_COST[tier])
        known = reached
    return tokens


def _cost(
    view: ClusterView, prefill: WorkerView, decode: WorkerView, request: Request
) -> tuple[float, float, int, int, str, str]:
    num_held = view.cached_at(decode.worker_id).device
    used = decode.num_used_blocks + num_decode_blocks(request, decode.block_size, num_held=num_held)
    return (
        prefill.num_waiting_tokens + _prefill_tokens(prefill, view.cached_at(prefill.worker_id), request),
        used / decode.num_blocks,
        prefill.num_requests,
        decode.num_requests,
        prefill.worker_id,
        decode.worker_id,
    )
