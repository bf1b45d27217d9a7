"""The KV of preempted requests in host memory: which slot holds which block of whom. Pure.

A slot is a block's room in host memory. A swapped group holds nothing on the device: the tables of its choices name
slots, one reference for each choice, as they named blocks before. Full blocks of a prompt keep their names here, so
what several swapped requests share lies here once, and is copied once. Bytes are copied by whoever carries out a plan,
in the order in which plans are made: a slot may be given to another as soon as the plan that reads it is there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from decode_pool.group import DecodeGroup, DecodeSequence, Phase
from tandem.kv.prefix_pool import PrefixPool
from tandem.types import BlockId


@dataclass(frozen=True, kw_only=True, slots=True)
class Swap:
    """One block to be copied between the device and a slot; which way, says the plan."""

    block: BlockId
    slot: BlockId


class SwapSpace:
    """`num_slots` slots; with none, nothing is ever swapped."""

    def __init__(self, num_slots: int) -> None:
        self._slots = PrefixPool(num_slots)

    @property
    def num_slots(self) -> int:
        """All of them."""
        return self._slots.num_blocks

    @property
    def num_free(self) -> int:
        """Slots that no swapped group holds."""
        return self._slots.num_free

    def take(self, group: DecodeGroup) -> tuple[tuple[Swap, ...], tuple[BlockId, ...]]:
        """A delivered group leaves the device. What is to be copied out, and the references that it had there.

        The caller has checked that there is room for `group.filled`, and releases the references once all is copied.
        """
        blocks, names = group.filled, group.prompt_names
        known = self._slots.acquire(names)
        own = self._slots.allocate(len(blocks) - len(known))
        assert own is not None, "no room in host memory"
        slots = (*known, *own)
        self._slots.publish(names, slots[: len(names)], tenant=group.tenant)
        slot_of = dict(zip(blocks, slots, strict=True))
        for sequence in group.sequences.values():
            sequence.slots, sequence.block_ids = tuple(slot_of[b] for b in sequence.block_ids), ()
        counts = Counter(slot for sequence in group.sequences.values() for slot in sequence.slots)
        self._slots.share(slot for slot, count in counts.items() for _ in range(count - 1))
        group.phase = Phase.SWAPPED
        swaps = tuple(Swap(block=b, slot=s) for b, s in slot_of.items())[len(known) :]
        return swaps, group.leave()

    def give_back(self, group: DecodeGroup, pool: PrefixPool) -> tuple[Swap, ...]:
        """A swapped group goes on: it holds what was found of its prompt, and `spare` for the rest. What to copy in."""
        block_of = dict(zip(group.filled, group.named, strict=False))
        swaps = []
        for sequence in group.sequences.values():
            for slot in sequence.slots:
                if slot not in block_of:
                    block_of[slot] = group.spare.pop(0)
                    swaps.append(Swap(block=block_of[slot], slot=slot))
            sequence.block_ids = tuple(block_of[slot] for slot in sequence.slots)
            self._release(sequence)
        group.settle(pool)
        group.prompt_blocks, group.phase = (), Phase.DELIVERED
        return tuple(swaps)

    def end(self, group: DecodeGroup, choice: int) -> None:
        """One choice of a swapped group is over."""
        self._release(group.sequences.pop(choice))

    def _release(self, sequence: DecodeSequence) -> None:
        self._slots.release(sequence.slots)
        sequence.slots = ()

    def check_invariants(self, groups: Iterable[DecodeGroup]) -> None:
        """Asserts that slots are held by exactly the swapped ones of `groups`."""
        self._slots.check_invariants()
        held = Counter(slot for group in groups for s in group.sequences.values() for slot in s.slots)
        assert all(self._slots.num_references(slot) == count for slot, count in held.items())
        assert len(held) == self._slots.num_blocks - self._slots.num_free
