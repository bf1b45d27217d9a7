"""Continuous batching for decode: which requests hold blocks, and which choices take part in the next iteration. Pure.

A request passes OFFERED (waits for blocks, in order) > RESERVED (holds the blocks of its prompt and of
the first part of its outputs; its KV is moving in) > DELIVERED: each of its choices is a sequence, which joins the
batch when there is room and then runs. Running sequences grow by a few blocks at a time.
Every grant, to an offer or for a running sequence, keeps the pool in a safe state (`safety.py`), so that all
can finish whatever length their outputs take: nothing is dropped or deadlocked. Where a grant would not be
safe, an offer waits in the queue and a running sequence skips iterations until others give blocks back.
Order is that of arrival, where each level of priority counts like `PRIORITY_S` seconds of it. No offer overtakes one
that waits, nor a running sequence that skips iterations; so all that were there before somebody finish in the end, and
nobody starves. The first that waits may have the last of those a level or more behind it swapped to host memory
(`preemption.py`): SWAPPED, these wait for blocks in the same order as offers, and go on where they were.
Sequences join and leave at every iteration. How choices share blocks is `group.py`'s.

Shape shared with the prefill pool and the simulator: add / schedule / commit / abort / check_invariants.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from decode_pool.group import BlockCopy, DecodeGroup, DecodeSequence, Phase, most_blocks
from decode_pool.plan import DecodeOutput, DecodePlan, DecodeStep, Key, Reservation, output_of
from decode_pool.preemption import Room, Want, choose_victims
from decode_pool.safety import is_safe
from decode_pool.swap_space import Swap, SwapSpace
from tandem.kv.prefix_pool import PrefixPool
from tandem.types import BlockId, Request, RequestId, SampledToken, TokenStep


class DecodeScheduler:
    """Owns the queue and the block pool of one decode worker."""

    def __init__(
        self,
        pool: PrefixPool,
        *,
        block_size: int,
        max_batch_sequences: int,
        growth_tokens: int = 256,
        num_swap_slots: int = 0,
    ) -> None:
        self.pool = pool
        self.swap_space = SwapSpace(num_swap_slots)
        self._block_size = block_size
        self._growth_blocks = max(1, growth_tokens // block_size)
        self._max_batch_sequences = max_batch_sequences
        self._groups: dict[RequestId, DecodeGroup] = {}
        self._executing: frozenset[Key] = frozenset()
        """Choices whose blocks the running iteration reads or writes."""
        self._ended: set[Key] = set()
        self._released: set[RequestId] = set()
        """Ended or released while the batch with them in it runs: freed at commit."""
        self._paused: frozenset[RequestId] = frozenset()
        """Those with a sequence that found no block when the newest plan was made."""
        self._reserved: list[RequestId] = []
        """Offers that hold their blocks, which `reserve` has not told yet."""
        self._leaving: list[BlockId] = []
        """References of swapped groups, until the running iteration has copied them out."""

    @property
    def num_running(self) -> int:
        """Choices in the batch or about to join it."""
        return sum(len(g.sequences) for g in self._groups.values() if g.phase is Phase.DELIVERED)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for blocks or for their KV."""
        return sum(g.phase is not Phase.DELIVERED for g in self._groups.values())

    @property
    def num_swapped(self) -> int:
        """Requests whose KV is in host memory."""
        return sum(g.phase is Phase.SWAPPED for g in self._groups.values())

    @property
    def has_reserved(self) -> bool:
        """Whether `reserve` has something to tell."""
        return bool(self._reserved)

    @property
    def num_unreserved(self) -> int:
        """Requests that wait for blocks."""
        return sum(g.phase is Phase.OFFERED for g in self._groups.values())

    @property
    def is_idle(self) -> bool:
        """Nothing can be scheduled until an event comes."""
        return not any(g.sequences for g in self._groups.values())

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._groups

    def __len__(self) -> int:
        return len(self._groups)

    def num_blocks_for(self, request: Request) -> int:
        """Most blocks that prompt and outputs can need."""
        return most_blocks(request, self._block_size, num_choices=request.num_choices)

    def _num_first_blocks(self, group: DecodeGroup) -> int:
        """Blocks reserved before a byte moves: the prompt or all that is written, and room for each output to go on."""
        if group.phase is Phase.SWAPPED:
            return min(group.num_most, len(group.filled) + group.num_live * self._growth_blocks)
        is_partly_filled = len(group.request.prompt_token_ids) % self._block_size != 0
        num_choices = group.request.num_choices
        num_copies = num_choices - 1 if is_partly_filled else 0
        return min(group.num_most, group.num_prompt_blocks + num_copies + num_choices * self._growth_blocks)

    def _grant(self, group: DecodeGroup, num_blocks: int) -> bool:
        """Gives a group `num_blocks` more if all can still finish then."""
        if not self.pool.can_allocate(num_blocks):
            return False
        claims = [g.claim for g in self._groups.values() if g.num_held and g is not group]
        claims.append(replace(group.claim, num_held=group.num_held + num_blocks))
        if not is_safe(claims, self.pool.num_free - num_blocks):
            return False
        blocks = self.pool.allocate(num_blocks)
        assert blocks is not None
        group.take(blocks)
        return True

    def add(self, request: Request) -> None:
        """Queues a handoff offer. The caller has checked that it can ever fit."""
        assert request.request_id not in self._groups
        assert self.num_blocks_for(request) <= self.pool.num_blocks
        self._groups[request.request_id] = DecodeGroup(request=request, block_size=self._block_size)

    def reserve(self) -> tuple[RequestId, ...]:
        """Reserves blocks for the first offers in order while there are enough; returns those that now hold them."""
        self._serve_waiting(is_boundary=False)
        reserved, self._reserved = self._reserved, []
        return tuple(reserved)

    def _serve_waiting(self, *, is_boundary: bool) -> dict[RequestId, tuple[Swap, ...]]:
        """Gives blocks to the first that wait for some: offers, and at a boundary swapped groups, with their copies."""
        swaps = {}
        last_s = min((group.request.order_s for group in self._stuck()), default=math.inf)
        for group in self._in_order(Phase.OFFERED, Phase.SWAPPED):
            may_come = is_boundary or group.phase is Phase.OFFERED
            if group.request.order_s > last_s or not may_come or not self._hold(group):
                break
            if group.phase is Phase.OFFERED:
                group.reserved()
                self._reserved.append(group.request.request_id)
            else:
                swaps[group.request.request_id] = self.swap_space.give_back(group, self.pool)
        return swaps

    def _stuck(self) -> list[DecodeGroup]:
        """Delivered groups with a sequence that waits for a block."""
        known = (self._groups[request_id] for request_id in self._paused if request_id in self._groups)
        return [group for group in known if group.phase is Phase.DELIVERED]

    def _hold(self, group: DecodeGroup) -> bool:
        """All that a group needs to go on, what is found of its prompt among it; or nothing."""
        num_blocks, names = self._num_first_blocks(group), group.prompt_names
        if not self.pool.can_allocate(num_blocks - self.pool.match(names)):
            return False
        group.find(self.pool.acquire(names))
        if self._grant(group, num_blocks - len(group.named)):
            return True
        group.lose(self.pool)
        return False

    def _in_order(self, *phases: Phase) -> list[DecodeGroup]:
        """The groups of some phases; equal ones as they came."""
        return sorted((g for g in self._groups.values() if g.phase in phases), key=lambda g: g.request.order_s)

    def reservation(self, request_id: RequestId) -> Reservation:
        """The blocks that a reserved request's prompt moves into."""
        group = self._groups[request_id]
        return Reservation(block_ids=group.prompt_blocks, num_found=len(group.named))

    def deliver(self, request_id: RequestId, first: tuple[TokenStep, ...]) -> None:
        """Prompt KV and each choice's first token are here: those that go on join at the next iteration.

        The request must be reserved, and at least one choice must go on.
        """
        group = self._groups[request_id]
        assert group.phase is Phase.RESERVED
        group.deliver(first, self.pool)

    def schedule(self) -> DecodePlan:
        """The next batch: what runs and has room for a token, then ready choices, both in order. May be empty.

        Sequences that skip it for want of a block take no place in it: those that can end may be behind them.
        """
        assert not self._executing, "the last plan has not been committed"
        returning = self._serve_waiting(is_boundary=True)
        ins = tuple(swap for swaps in returning.values() for swap in swaps)
        if victims := self._choose_victims():
            self._executing = self._choices_of(returning)
            return self._preempt(victims, ins)
        sequences = [(group, s) for group in self._in_order(Phase.DELIVERED) for s in group.sequences.values()]
        sequences.sort(key=lambda pair: not pair[1].is_running)
        known = {g.request.request_id for g, s in sequences if s.is_running}
        steps: list[DecodeStep] = []
        copies: list[BlockCopy] = []
        moving: set[RequestId] = set(returning)
        paused: set[RequestId] = set()
        for group, sequence in sequences:
            if len(steps) == self._max_batch_sequences:
                break
            if not self._may_write(group, sequence):
                paused.add(group.request.request_id)
                continue
            if (copy := group.give_room(sequence, self.pool)) is not None:
                copies.append(copy)
                moving.add(group.request.request_id)
            sequence.is_running = True
            steps.append(self._step(group, sequence))
        self._paused = frozenset(paused)
        self._executing = self._choices_of(moving) | {(step.request.request_id, step.choice) for step in steps}
        newcomers = dict.fromkeys(s.request.request_id for s in steps if s.request.request_id not in known)
        return DecodePlan(steps=tuple(steps), admitted=tuple(newcomers), copies=tuple(copies), ins=ins)

    def _choices_of(self, request_ids: Iterable[RequestId]) -> frozenset[Key]:
        return frozenset((name, choice) for name in request_ids for choice in self._groups[name].sequences)

    def _choose_victims(self) -> tuple[DecodeGroup, ...]:
        """Who is to be swapped out, for the first that waits for blocks."""
        if not self.swap_space.num_slots:
            return ()
        waiting = [*self._stuck(), *self._in_order(Phase.OFFERED, Phase.SWAPPED)]
        first = min(waiting, key=lambda group: group.request.order_s, default=None)
        if first is None:
            return ()
        want = Want(group=first, num_blocks=1)
        if first.phase is not Phase.DELIVERED:
            found = self.pool.found(first.prompt_names)
            want = Want(group=first, num_blocks=self._num_first_blocks(first) - len(found), found=found)
        room = Room(num_blocks=self.pool.num_free, num_slots=self.swap_space.num_free)
        return choose_victims(want, self._groups.values(), room)

    def _preempt(self, victims: Iterable[DecodeGroup], ins: tuple[Swap, ...]) -> DecodePlan:
        outs: list[Swap] = []
        names = []
        for group in victims:
            swaps, references = self.swap_space.take(group)
            outs += swaps
            self._leaving += references
            names.append(group.request.request_id)
        return DecodePlan(steps=(), ins=ins, outs=tuple(outs), preempted=tuple(names))

    def _may_write(self, group: DecodeGroup, sequence: DecodeSequence) -> bool:
        """Whether there is a block for the newest token's KV, growing the group if need be and if that is safe."""
        if group.spare or not group.needs_block(sequence, self.pool):
            return True
        left = group.num_most - group.num_held
        return self._grant(group, min(left, self._growth_blocks)) or self._grant(group, 1)

    def _step(self, group: DecodeGroup, sequence: DecodeSequence) -> DecodeStep:
        num_output = len(sequence.output)
        return DecodeStep(
            request=group.request,
            choice=sequence.choice,
            token_id=sequence.output[-1],
            num_computed=len(group.request.prompt_token_ids) + num_output - 1,
            output_position=num_output,
            block_ids=sequence.block_ids,
        )

    def commit(self, plan: DecodePlan, tokens: Sequence[SampledToken]) -> tuple[DecodeOutput, ...]:
        """Books an executed plan. Finished choices leave, and so do those ended meanwhile, without output."""
        self._executing = frozenset()
        self.pool.release(self._leaving)
        self._leaving = []
        self._free_ended()
        outputs = []
        for step, token in zip(plan.steps, tokens, strict=True):
            request_id = step.request.request_id
            group = self._groups.get(request_id)
            if group is None or step.choice not in group.sequences:
                continue
            group.sequences[step.choice].output.append(token.token_id)
            reason = step.request.sampling.finish_reason(token.token_id, step.output_position)
            is_last = reason is not None and self.end_choice(request_id, step.choice)
            outputs.append(DecodeOutput(request_id=request_id, step=output_of(step, token), is_last=is_last))
        if plan.preempted:
            self._serve_waiting(is_boundary=False)  # before any running sequence grows into their room
        return tuple(outputs)

    def _free_ended(self) -> None:
        """What ended while the iteration ran."""
        ended, self._ended = self._ended, set()
        for request_id, choice in ended:
            self.end_choice(request_id, choice)
        released, self._released = self._released, set()
        for request_id in released:
            self.release(request_id)

    def end_choice(self, request_id: RequestId, choice: int) -> bool:
        """Ends one choice of a delivered request; others go on. Whether none is left. Idempotent."""
        group = self._groups.get(request_id)
        if group is None or group.phase < Phase.DELIVERED:
            return group is None
        if choice in group.sequences and (request_id, choice) in self._executing:
            self._ended.add((request_id, choice))
        elif choice in group.sequences:
            self._end(group, choice)
        if any((request_id, other) not in self._ended for other in group.sequences):
            return False
        self.release(request_id)
        return True

    def abort(self, request_id: RequestId) -> bool:
        """Ends a request that owns its blocks (DELIVERED), or that has none (OFFERED, SWAPPED).

        False for RESERVED ones that `reserve` has told: their blocks belong to the handoff, which calls `release` when
        it has drained.
        """
        group = self._groups.get(request_id)
        if group is None:
            return True
        if group.phase is Phase.RESERVED and request_id not in self._reserved:
            return False
        self.release(request_id)
        return True

    def release(self, request_id: RequestId) -> None:
        """Forgets a request and frees its blocks. Idempotent.

        Blocks that the running iteration reads or writes are freed when it is committed.
        """
        group = self._groups.get(request_id)
        if group is None:
            return
        if any((request_id, choice) in self._executing for choice in group.sequences):
            self._released.add(request_id)
            return
        del self._groups[request_id]
        self._reserved = [name for name in self._reserved if name != request_id]
        for choice in tuple(group.sequences):
            self._end(group, choice)
        group.release_all(self.pool)

    def _end(self, group: DecodeGroup, choice: int) -> None:
        if group.phase is Phase.SWAPPED:
            self.swap_space.end(group, choice)
        else:
            group.end(choice, self.pool)

    def check_invariants(self) -> None:
        """Asserts that exactly the groups RESERVED and DELIVERED hold blocks, and several of them only named ones."""
        self.pool.check_invariants()
        self.swap_space.check_invariants(self._groups.values())
        coming = set(self._leaving).difference(*(g.counts for g in self._groups.values()))
        assert is_safe([g.claim for g in self._groups.values() if g.num_held], self.pool.num_free + len(coming))
        references = Counter(self._leaving)
        for group in self._groups.values():
            counts = Counter(b for s in group.sequences.values() for b in s.block_ids)
            counts.update((*group.prompt_blocks, *group.spare))
            assert counts == group.counts
            assert group.num_held <= group.num_most
            assert bool(group.num_held) == (group.phase in (Phase.RESERVED, Phase.DELIVERED))
            assert bool(group.sequences) == (group.phase >= Phase.DELIVERED)
            assert all(bool(s.slots) == (group.phase is Phase.SWAPPED) for s in group.sequences.values())
            assert all(len(s.output) < group.request.sampling.max_tokens for s in group.sequences.values())
            assert not references.keys() & counts.keys() - set(group.named)
            references += counts
        assert all(self.pool.num_references(block) == count for block, count in references.items())
        assert len(references) == self.pool.num_blocks - self.pool.num_free
