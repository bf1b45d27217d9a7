"""A simulated handoff: which blocks of a prompt are still to be sent, and whether all that was has landed. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.simulator.life import Life
from tandem.types import RequestId, WorkerId


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """`num_layers` layers of some blocks, complete when layer `last_layer` is computed."""

    last_layer: int
    num_layers: int
    num_blocks: int


@dataclass(kw_only=True, slots=True)
class Handoff:
    """Of one request, from its route on."""

    life: Life
    source: WorkerId
    destination: WorkerId
    first_block: int = 0
    """Blocks before it are held by the destination and never sent; known with the ticket."""
    num_posted_blocks: int = 0
    """Leading blocks that were computed (or found) and given to the link."""
    num_under_way: int = 0
    is_computed: bool = False
    """Whether the record with the first token has arrived."""

    @property
    def request_id(self) -> RequestId:
        """Its request."""
        return self.life.request.request_id

    @property
    def is_delivered(self) -> bool:
        """All that was posted is there, and nothing more comes."""
        return self.is_computed and not self.num_under_way

    def advance(self, num_blocks: int) -> tuple[int, int]:
        """The prompt's first `num_blocks` blocks are complete: how many of the new ones are sent, and how many held."""
        first, self.num_posted_blocks = self.num_posted_blocks, num_blocks
        num_new = num_blocks - first
        num_sent = max(0, num_blocks - max(first, self.first_block))
        return num_sent, num_new - num_sent
