"""The choices of one request on a decode worker, and the blocks that they share. Pure.

Ownership of a group's blocks, by counted references in the pool (of which the group keeps count itself, because other
groups may hold named ones too):

    before delivery    all blocks are the group's: the prompt's first, then `spare`
    afterwards         each live choice holds the prompt's blocks and those it has written; the group holds `spare`
    while swapped      none: what the choices have written lies in slots of host memory (`swap_space.py`)

The prompt's last block may be partly filled. Whoever first writes into it while others hold it gets a copy; the last
one writes in place. So a group never needs more than `num_most` different blocks. Full blocks of the prompt may be
named: then they are other groups' too, and nobody writes them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum

from decode_pool.safety import Claim
from tandem.kv.hashing import chain
from tandem.kv.prefix_pool import PrefixPool
from tandem.types import BlockHash, BlockId, Request, TokenStep


class Phase(IntEnum):
    """How far a request has come."""

    OFFERED = 0
    RESERVED = 1
    DELIVERED = 2
    SWAPPED = 3
    """Delivered once; its KV is in host memory, and it waits for blocks again."""


@dataclass(kw_only=True, slots=True)
class DecodeSequence:
    """One choice being decoded."""

    choice: int
    block_ids: tuple[BlockId, ...]
    output: list[int]
    is_running: bool = False
    slots: tuple[BlockId, ...] = ()
    """In host memory, instead of `block_ids` while swapped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCopy:
    """One block to be copied to another before the iteration's tokens are computed."""

    source: BlockId
    destination: BlockId


@dataclass(kw_only=True, slots=True)
class DecodeGroup:
    """A request being decoded."""

    request: Request
    block_size: int
    phase: Phase = Phase.OFFERED
    prompt_blocks: tuple[BlockId, ...] = ()
    spare: list[BlockId] = field(default_factory=list)
    sequences: dict[int, DecodeSequence] = field(default_factory=dict)
    named: tuple[BlockId, ...] = ()
    """Leading blocks of the prompt that can be found by name."""
    counts: Counter[BlockId] = field(default_factory=Counter)
    """References that the group holds."""

    @property
    def num_held(self) -> int:
        """Its different blocks."""
        return len(self.counts)

    @property
    def prompt_names(self) -> tuple[BlockHash, ...]:
        """Names of the prompt's full blocks; none when the request has none."""
        return () if self.request.prefix is None else self.request.prefix.blocks

    @property
    def tenant(self) -> str:
        """Whose the request is."""
        return "" if self.request.prefix is None else self.request.prefix.tenant

    @property
    def num_prompt_blocks(self) -> int:
        """Blocks of the prompt, the last of which may be partly filled."""
        return -(-len(self.request.prompt_token_ids) // self.block_size)

    @property
    def num_live(self) -> int:
        """Choices that may still need blocks."""
        return len(self.sequences) if self.phase >= Phase.DELIVERED else self.request.num_choices

    @property
    def filled(self) -> tuple[BlockId, ...]:
        """Different blocks (slots while swapped) of the live choices, the prompt's first."""
        tables = (s.slots or s.block_ids for s in self.sequences.values())
        return tuple(dict.fromkeys(block for table in tables for block in table))

    @property
    def num_most(self) -> int:
        """Most different blocks that the live choices can come to need."""
        return most_blocks(self.request, self.block_size, num_choices=self.num_live)

    @property
    def claim(self) -> Claim:
        """What the banker needs to know."""
        return Claim(num_held=self.num_held, num_most=self.num_most, named=self.named)

    def take(self, blocks: tuple[BlockId, ...]) -> None:
        """More blocks for the group, with a reference each."""
        self.spare += blocks
        self.counts.update(blocks)

    def find(self, blocks: tuple[BlockId, ...]) -> None:
        """Leading blocks of the prompt that are here already, with a reference each."""
        self.named = self.prompt_blocks = blocks
        self.counts.update(blocks)

    def lose(self, pool: PrefixPool) -> None:
        """Gives back what was found: the rest could not be had."""
        self._release(self.prompt_blocks, pool)
        self.named = self.prompt_blocks = ()

    def reserved(self) -> None:
        """It has blocks for all of its prompt: KV may move into those that were not found."""
        count = self.num_prompt_blocks - len(self.named)
        self.prompt_blocks, self.spare = (*self.prompt_blocks, *self.spare[:count]), self.spare[count:]
        self.phase = Phase.RESERVED

    def deliver(self, first: tuple[TokenStep, ...], pool: PrefixPool) -> None:
        """Prompt KV and first tokens are here; choices that go on share the prompt's blocks. At least one must."""
        self._publish_prompt(pool)
        live = [step for step in first if step.finish_reason is None]
        for _ in live[1:]:
            pool.share(self.prompt_blocks)
            self.counts.update(self.prompt_blocks)
        self.sequences = {
            s.choice: DecodeSequence(choice=s.choice, block_ids=self.prompt_blocks, output=[s.token_id]) for s in live
        }
        self.prompt_blocks, self.phase = (), Phase.DELIVERED
        self._trim(pool)

    def _publish_prompt(self, pool: PrefixPool) -> None:
        """Names the prompt's full blocks. What came twice meanwhile is kept once."""
        names, num_known = self.prompt_names, len(self.named)
        own = self.prompt_blocks[num_known : len(names)]
        found = pool.publish(names, own, num_known=num_known, tenant=self.tenant)
        if found != own:
            others = [(block, mine) for block, mine in zip(found, own, strict=True) if block != mine]
            self.counts.update(block for block, _ in others)
            self._release((mine for _, mine in others), pool)
        self.named += found
        self.prompt_blocks = (*self.named, *self.prompt_blocks[len(names) :])

    def end(self, choice: int, pool: PrefixPool) -> None:
        """A choice is over: its own references go, others' stay. Its full blocks are named first."""
        sequence = self.sequences.pop(choice)
        names = self._names_of(sequence)
        num_known = len(self.named)
        own = sequence.block_ids[num_known : len(names)]
        found = pool.publish(names, own, num_known=num_known, tenant=self.tenant)
        prompt = zip(found[: len(self.prompt_names) - num_known], own, strict=False)
        self.named += tuple(block for block, mine in prompt if block == mine)
        self._release(sequence.block_ids, pool)
        pool.release(block for block, mine in zip(found, own, strict=True) if block != mine)
        self._trim(pool)

    def _names_of(self, sequence: DecodeSequence) -> tuple[BlockHash, ...]:
        """Of all blocks that the choice has filled; the KV of its newest token was never written."""
        prefix = self.request.prefix
        if prefix is None:
            return ()
        first = len(prefix.blocks) * self.block_size
        tokens = (*self.request.prompt_token_ids[first:], *sequence.output[:-1])
        parent = prefix.blocks[-1] if prefix.blocks else prefix.root
        return (*prefix.blocks, *chain(parent, tokens, self.block_size))

    def leave(self) -> tuple[BlockId, ...]:
        """Lets go of all its blocks, which are the caller's to release: each once for every reference."""
        references = tuple(self.counts.elements())
        self.counts, self.spare, self.named = Counter(), [], ()
        return references

    def settle(self, pool: PrefixPool) -> None:
        """Each choice gets references of its own to the blocks of its table, of which the group has one each."""
        for block, count in Counter(b for s in self.sequences.values() for b in s.block_ids).items():
            more = count - self.counts[block]
            pool.share((block,) * more)
            self.counts[block] += more

    def release_all(self, pool: PrefixPool) -> None:
        """Nothing of the group is left; its choices have ended."""
        self._release((*self.prompt_blocks, *self.spare), pool)
        self.prompt_blocks, self.spare, self.named = (), [], ()

    def give_room(self, sequence: DecodeSequence, pool: PrefixPool) -> BlockCopy | None:
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

    def needs_block(self, sequence: DecodeSequence, pool: PrefixPool) -> bool:
        """Whether the newest token's KV has no place of its own yet."""
        at = self._written_block(sequence)
        return at == len(sequence.block_ids) or pool.is_shared(sequence.block_ids[at])

    def _written_block(self, sequence: DecodeSequence) -> int:
        return (len(self.request.prompt_token_ids) + len(sequence.output) - 1) // self.block_size

    def _trim(self, pool: PrefixPool) -> None:
        """Gives back what the live choices cannot need any more."""
        excess = min(len(self.spare), max(0, self.num_held - self.num_most))
        if excess:
            self._release(tuple(self.spare[-excess:]), pool)
            del self.spare[-excess:]

    def _release(self, blocks: Iterable[BlockId], pool: PrefixPool) -> None:
        for block in blocks:
            pool.release((block,))
            self.counts[block] -= 1
            if not self.counts[block]:
                del self.counts[block]


def most_blocks(request: Request, block_size: int, *, num_choices: int) -> int:
    """Most different blocks that prompt and outputs can need; the last output token's own KV is never written."""
    num_prompt_tokens = len(request.prompt_token_ids)
    num_shared = num_prompt_tokens // block_size
    num_each = -(-(num_prompt_tokens + request.sampling.max_tokens - 1) // block_size)
    return num_shared + num_choices * (num_each - num_shared)
