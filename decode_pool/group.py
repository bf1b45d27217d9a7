"""The choices of one request on a decode worker, and the blocks that they share. Pure.

Ownership of a group's blocks, by counted references in the pool:

    before delivery    all blocks are the group's: the prompt's first, then `spare`
    afterwards         each live choice holds the prompt's blocks and those it has written; the group holds `spare`

The prompt's last block may be partly filled. Whoever first writes into it while others hold it gets a copy; the last
one writes in place. So a group never needs more than `num_most` different blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from decode_pool.safety import Claim
from tandem.kv.block_pool import BlockPool
from tandem.types import BlockId, Request, TokenStep


class Phase(IntEnum):
    """How far a request has come."""

    OFFERED = 0
    RESERVED = 1
    DELIVERED = 2


@dataclass(kw_only=True, slots=True)
class DecodeSequence:
    """One choice being decoded."""

    choice: int
    block_ids: tuple[BlockId, ...]
    output: list[int]
    is_running: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCopy:
    """One block to be copied to another before the iteration's tokens are computed."""

    source: BlockId
    destination: BlockId


@dataclass(kw_only=True, slots=True)
class DecodeGroup:
    """A request being decoded. `num_held` counts its different blocks."""

    request: Request
    block_size: int
    phase: Phase = Phase.OFFERED
    prompt_blocks: tuple[BlockId, ...] = ()
    spare: list[BlockId] = field(default_factory=list)
    sequences: dict[int, DecodeSequence] = field(default_factory=dict)
    num_held: int = 0

    @property
    def num_prompt_blocks(self) -> int:
        """Blocks of the prompt, the last of which may be partly filled."""
        return -(-len(self.request.prompt_token_ids) // self.block_size)

    @property
    def num_live(self) -> int:
        """Choices that may still need blocks."""
        return len(self.sequences) if self.phase is Phase.DELIVERED else self.request.num_choices

    @property
    def num_most(self) -> int:
        """Most different blocks that the live choices can come to need."""
        return most_blocks(self.request, self.block_size, num_choices=self.num_live)

    @property
    def claim(self) -> Claim:
        """What the banker needs to know."""
        return Claim(num_held=self.num_held, num_most=self.num_most)

    def take(self, blocks: tuple[BlockId, ...]) -> None:
        """More blocks for the group."""
        self.spare += blocks
        self.num_held += len(blocks)

    def reserved(self) -> None:
        """The first of its blocks are the prompt's: KV may move in."""
        count = self.num_prompt_blocks
        self.prompt_blocks, self.spare = tuple(self.spare[:count]), self.spare[count:]
        self.phase = Phase.RESERVED

    def deliver(self, first: tuple[TokenStep, ...], pool: BlockPool) -> None:
        """Prompt KV and first tokens are here; choices that go on share the prompt's blocks. At least one must."""
        live = [step for step in first if step.finish_reason is None]
        for _ in live[1:]:
            pool.share(self.prompt_blocks)
        self.sequences = {
            s.choice: DecodeSequence(choice=s.choice, block_ids=self.prompt_blocks, output=[s.token_id]) for s in live
        }
        self.prompt_blocks, self.phase = (), Phase.DELIVERED
        self._trim(pool)

    def end(self, choice: int, pool: BlockPool) -> None:
        """A choice is over: its own references go, others' stay."""
        self._release(self.sequences.pop(choice).block_ids, pool)
        self._trim(pool)

    def release_all(self, pool: BlockPool) -> None:
        """Nothing of the group is left."""
        for choice in tuple(self.sequences):
            self._release(self.sequences.pop(choice).block_ids, pool)
        self._release((*self.prompt_blocks, *self.spare), pool)
        self.prompt_blocks, self.spare = (), []

    def give_room(self, sequence: DecodeSequence, pool: BlockPool) -> BlockCopy | None:
        """Makes the newest token's place writable, with a block of `spare` where that is needed."""
        at = self._written_block(sequence)
        if at == len(sequence.block_ids):
            sequence.block_ids += (self.spare.pop(0),)
            return None
        if not pool.is_shared(sequence.block_ids[at]):
            return None
        copy = BlockCopy(source=sequence.block_ids[at], destination=self.spare.pop(0))
        self._release((copy.source,), pool)
        sequence.block_ids = (*sequence.block_ids[:at], copy.destination, *sequence.block_ids[at + 1 :])
        return copy

    def needs_block(self, sequence: DecodeSequence, pool: BlockPool) -> bool:
        """Whether the newest token's KV has no place of its own yet."""
        at = self._written_block(sequence)
        return at == len(sequence.block_ids) or pool.is_shared(sequence.block_ids[at])

    def _written_block(self, sequence: DecodeSequence) -> int:
        return (len(self.request.prompt_token_ids) + len(sequence.output) - 1) // self.block_size

    def _trim(self, pool: BlockPool) -> None:
        """Gives back what the live choices cannot need any more."""
        excess = min(len(self.spare), max(0, self.num_held - self.num_most))
        if excess:
            self._release(tuple(self.spare[-excess:]), pool)
            del self.spare[-excess:]

    def _release(self, blocks: tuple[BlockId, ...], pool: BlockPool) -> None:
        before = pool.num_free
        pool.release(blocks)
        self.num_held -= pool.num_free - before


def most_blocks(request: Request, block_size: int, *, num_choices: int) -> int:
    """Most different blocks that prompt and outputs can need; the last output token's own KV is never written."""
    num_prompt_tokens = len(request.prompt_token_ids)
    num_shared = num_prompt_tokens // block_size
    num_each = -(-(num_prompt_tokens + request.sampling.max_tokens - 1) // block_size)
    return num_shared + num_choices * (num_each - num_shared)
