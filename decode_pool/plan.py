"""What the decode scheduler decides, as data: plans of iterations, their outputs, reservations. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from decode_pool.group import BlockCopy
from decode_pool.swap_space import Swap
from tandem.types import BlockId, Request, RequestId, SampledToken, TokenStep

Key = tuple[RequestId, int]
"""A choice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeStep:
    """One token of one choice: `token_id` is at context position `num_computed`, its successor is sampled."""

    request: Request
    choice: int
    token_id: int
    num_computed: int
    output_position: int
    block_ids: tuple[BlockId, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodePlan:
    """One iteration: `ins`, `outs` and `copies` of blocks in this order, then `steps`.

    A plan that swaps requests out has no steps: it gives their blocks to those that wait for them at once.
    """

    steps: tuple[DecodeStep, ...]
    admitted: tuple[RequestId, ...] = ()
    """Requests in it for the first time."""
    copies: tuple[BlockCopy, ...] = ()
    ins: tuple[Swap, ...] = ()
    """From host memory."""
    outs: tuple[Swap, ...] = ()
    """To host memory."""
    preempted: tuple[RequestId, ...] = ()
    """Whose blocks are taken with it."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.steps or self.ins or self.preempted)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeOutput:
    """One output token. With `is_last` the request has no other choice left, and its blocks are free."""

    request_id: RequestId
    step: TokenStep
    is_last: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Reservation:
    """All blocks of a prompt, of which the first `num_found` have their KV already."""

    block_ids: tuple[BlockId, ...]
    num_found: int


def output_of(step: DecodeStep, token: SampledToken) -> TokenStep:
    """What was sampled after a step, and whether it ends its choice."""
    return TokenStep(
        position=step.output_position,
        token_id=token.token_id,
        finish_reason=step.request.sampling.finish_reason(token.token_id, step.output_position),
        choice=step.choice,
        logprobs=token.logprobs,
    )
