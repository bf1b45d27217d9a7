"""The seam between the router's front (protocols, tokens, text) and its dispatch (workers, legs, retries)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from tandem.rpc.tandem.v1 import common_pb2, inference_pb2
from tandem.types import PromptScores, Request, TokenStep, WorkerId

Step = TokenStep | PromptScores


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """The model that the ready workers serve."""

    name: str
    max_context_tokens: int
    block_size: int
    model_context_tokens: int = 0
    """What the model itself could take: more than `max_context_tokens` where the pools' blocks hold less."""
    decode_blocks: int = 0
    """Blocks of the smallest decode worker, for all choices of a request together; 0 where that is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatchResult:
    """Known when a request has ended normally, or was stopped early by the front. Timings may be missing."""

    prefill_worker: WorkerId
    decode_worker: WorkerId | None
    prefill: common_pb2.PrefillTimings | None
    decode: common_pb2.DecodeTimings | None


class Dispatch(Protocol):
    """One running request."""

    def __aiter__(self) -> AsyncIterator[Step]:
        """Steps of each choice in order; ends when every choice has had its finish_reason or was stopped.

        The prompt's scores, where they were asked for, come before all tokens. Raises TandemError.
        """

    def stop(self, choice: int) -> None:
        """No more of this choice is wanted; others go on. Idempotent."""

    async def finish(self) -> DispatchResult:
        """After the last step wanted: stops both legs if they still run, and waits briefly for their timings."""

    async def abort(self) -> None:
        """Stops both legs, in any phase. Idempotent, also after `finish`."""


class Dispatcher(Protocol):
    """Sends requests to workers."""

    def dispatch(self, request: Request) -> Dispatch:
        """Starts `request`. Raises TandemError when it is refused at once; later failures come from the iterator."""

    def model(self) -> ServedModel | None:
        """The model served; None while no worker is ready."""

    def ready(self) -> bool:
        """Whether at least one compatible pair of prefill and decode worker takes requests."""

    async def status(self) -> inference_pb2.ClusterStatus:
        """What each worker says of itself now."""
