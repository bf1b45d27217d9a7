"""Which prefill worker and which decode worker a request goes to, in one decision. Pure.

Now by load alone: the prefill worker with the fewest prompt tokens before it, the decode worker with the largest share
of blocks left after admission. Predicted TTFT and TBT, cached prefixes and links will join as terms of `_cost`.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.view import ClusterView, WorkerView
from tandem.errors import WorkerUnavailable
from tandem.types import Request


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """Where a request goes. `decode` is None when nothing will be left to decode."""

    prefill: WorkerView
    decode: WorkerView | None


EXPECTED_OUTPUT_TOKENS = 256
"""Output that a request is taken to have for balancing, where its max_tokens allows more."""


def num_decode_blocks(request: Request, block_size: int) -> int:
    """Blocks that a request is expected to take on a decode worker; its choices share the prompt's full ones."""
    num_prompt_tokens = len(request.prompt_token_ids)
    num_output_tokens = min(request.sampling.max_tokens, EXPECTED_OUTPUT_TOKENS)
    num_shared = num_prompt_tokens // block_size
    num_each = -(-(num_prompt_tokens + num_output_tokens) // block_size)
    return num_shared + request.num_choices * (num_each - num_shared)


def route(view: ClusterView, request: Request, now: float) -> Route:
    """The cheapest compatible pair. Raises WorkerUnavailable when there is none.

    Ties go to fewer requests, then to the smaller id, so that equal views give equal routes.
    """
    pairs = view.pairs()
    if not pairs:
        raise WorkerUnavailable("no compatible pair of a prefill and a decode worker is ready", retry_after_s=1.0)
    prefill, decode = min(pairs, key=lambda pair: _cost(pair[0], pair[1], request))
    return Route(prefill=prefill, decode=decode if request.sampling.max_tokens > 1 else None)


def _cost(prefill: WorkerView, decode: WorkerView, request: Request) -> tuple[float, float, int, int, str, str]:
    used = decode.num_used_blocks + num_decode_blocks(request, decode.block_size)
    return (
        prefill.num_waiting_tokens,
        used / decode.num_blocks,
        prefill.num_requests,
        decode.num_requests,
        prefill.worker_id,
        decode.worker_id,
    )
