"""A prompt on a prefill worker: how far it has come and which blocks it holds. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from tandem.types import BlockId, Request, WorkerId


class Phase(IntEnum):
    """How far a prompt has come."""

    QUEUED = 0
    OFFERED = 1
    READY = 2
    RUNNING = 3
    COMPUTED = 4


@dataclass(kw_only=True, slots=True)
class PrefillSequence:
    """A prompt being computed."""

    request: Request
    destination: WorkerId | None
    phase: Phase = Phase.QUEUED
    num_computed: int = 0
    num_chunks: int = 0
    served_s: float = 0.0
    """Seconds of iterations that computed something of it."""
    num_cached: int = 0
    """Prompt tokens that were not computed because their KV was here, or was loaded."""
    block_ids: tuple[BlockId, ...] = ()
    named: list[BlockId] = field(default_factory=list)
    """The blocks found by the names of the prompt's first full blocks: its own, or another's with the same content."""
    num_hits: int = 0
    """Leading tokens whose KV was here, or was offered by the store, when that was last looked at."""
    is_fetching: bool = False
    offered: range = range(0)
    """Blocks that the store has ready."""

    @property
    def may_run(self) -> bool:
        """Whether it waits for nothing but its turn."""
        return self.phase is Phase.RUNNING or (self.phase is Phase.READY and not self.is_fetching)

    @property
    def held(self) -> tuple[BlockId, ...]:
        """All references of the prompt: its own blocks, and others' that stand for what it computed as well."""
        others = (block for block, own in zip(self.named, self.block_ids, strict=False) if block != own)
        return (*self.block_ids, *others)

    @property
    def num_left(self) -> int:
        """Prompt tokens not yet computed."""
        return len(self.request.prompt_token_ids) - self.num_computed

    @property
    def num_expected(self) -> int:
        """Prompt tokens that are probably still to be computed: before the start, hits are left out."""
        return self.num_left - (self.num_hits if self.phase < Phase.RUNNING else 0)
