"""Continuous batching for decode: which requests hold blocks, and which choices take part in the next iteration. Pure.

A request passes OFFERED (waits for blocks, in order) > RESERVED (holds the blocks of its prompt and of
the first part of its outputs; its KV is moving in) > DELIVERED: each of its choices is a sequence, which joins the
batch when there is room and then runs. Running sequences grow by a few blocks at a time.
Every grant, to an offer or for a running sequence, keeps the pool in a safe state (`safety.py`), so that all
can finish whatever length their outputs take: nothing is preempted, dropped or deadlocked. Where a grant would not be
safe, an offer waits in the queue and a running sequence skips iterations until others give blocks back.
Order is that of arrival, where each level of priority counts like `PRIORITY_S` seconds of it. No offer overtakes one
that waits, nor a running sequence that skips iterations; so all that were there before somebody finish in the end, and
nobody starves. Sequences join and leave at every iteration. How choices share blocks is `group.py`'s.

Shape shared with the prefill pool and the simulator: add / schedule / commit / abort / check_invariants.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from decode_pool.group import BlockCopy, DecodeGroup, DecodeSequence, Phase, most_blocks
from decode_pool.safety import is_safe
from tandem.kv.prefix_pool import PrefixPool
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
    """One iteration: `copies` first, then `steps`. `admitted` are requests in it for the first time."""

    steps: tuple[DecodeStep, ...]
    admitted: tuple[RequestId, ...]
    copies: tuple[BlockCopy, ...] = ()


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


class DecodeScheduler:
    """Owns the queue and the block pool of one decode worker."""

    def __init__(
        self, pool: PrefixPool, *, block_size: int, max_batch_sequences: int, growth_tokens: int = 256
    ) -> None:
        self.pool = pool
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

    @property
    def num_running(self) -> int:
        """Choices in the batch or about to join it."""
        return sum(len(g.sequences) for g in self._groups.values())

    @property
    def num_waiting(self) -> int:
        """Requests that wait for blocks or for their KV."""
        return sum(g.phase < Phase.DELIVERED for g in self._groups.values())

    @property
    def num_unreserved(self) -> int:
        """Requests that wait for blocks."""
        return sum(g.phase is Phase.OFFERED for g in self._groups.values())

    @property
    def is_idle(self) -> bool:
        """Nothing can be scheduled until an event comes."""
        return not self.num_running

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._groups

    def __len__(self) -> int:
        return len(self._groups)

    def num_blocks_for(self, request: Request) -> int:
        """Most blocks that prompt and outputs can need."""
        return most_blocks(request, self._block_size, num_choices=request.num_choices)

    def _num_first_blocks(self, group: DecodeGroup) -> int:
        """Blocks reserved before a byte moves: the prompt, and room for each output to begin."""
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
        reserved = []
        last_s = min((self._groups[r].request.order_s for r in self._paused if r in self._groups), default=math.inf)
        for group in self._in_order(Phase.OFFERED):
            if group.request.order_s > last_s:
                break
            num_found = self.pool.match(group.prompt_names)
            if not self.pool.can_allocate(self._num_first_blocks(group) - num_found):
                break
            found = self.pool.acquire(group.prompt_names)
            group.find(found)
            if not self._grant(group, self._num_first_blocks(group) - len(found)):
                group.release_all(self.pool)
                break
            group.reserved()
            reserved.append(group.request.request_id)
        return tuple(reserved)

    def _in_order(self, phase: Phase) -> list[DecodeGroup]:
        """The groups of one phase; equal ones as they came."""
        return sorted((g for g in self._groups.values() if g.phase is phase), key=lambda g: g.request.order_s)

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
        sequences = [(group, s) for group in self._in_order(Phase.DELIVERED) for s in group.sequences.values()]
        sequences.sort(key=lambda pair: not pair[1].is_running)
        known = {g.request.request_id for g, s in sequences if s.is_running}
        steps: list[DecodeStep] = []
        copies: list[BlockCopy] = []
        copying: set[RequestId] = set()
        paused: set[RequestId] = set()
        for group, sequence in sequences:
            if len(steps) == self._max_batch_sequences:
                break
            if not self._may_write(group, sequence):
                paused.add(group.request.request_id)
                continue
            if (copy := group.give_room(sequence, self.pool)) is not None:
                copies.append(copy)
                copying.add(group.request.request_id)
            sequence.is_running = True
            steps.append(self._step(group, sequence))
        self._paused = frozenset(paused)
        self._executing = frozenset(
            (request_id, choice)
            for request_id, group in self._groups.items()
            for choice in group.sequences
            if request_id in copying
        ) | frozenset((step.request.request_id, step.choice) for step in steps)
        newcomers = dict.fromkeys(s.request.request_id for s in steps if s.request.request_id not in known)
        return DecodePlan(steps=tuple(steps), admitted=tuple(newcomers), copies=tuple(copies))

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
            outputs.append(DecodeOutput(request_id=request_id, step=_output(step, token), is_last=is_last))
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
        if group is None or group.phase is not Phase.DELIVERED:
            return group is None
        if choice in group.sequences and (request_id, choice) in self._executing:
            self._ended.add((request_id, choice))
        elif choice in group.sequences:
            group.end(choice, self.pool)
        if any((request_id, other) not in self._ended for other in group.sequences):
            return False
        self.release(request_id)
        return True

    def abort(self, request_id: RequestId) -> bool:
        """Ends a request that owns its blocks (DELIVERED), or that has none yet (OFFERED).

        False for RESERVED ones: their blocks belong to the handoff, which calls `release` when it has drained.
        """
        group = self._groups.get(request_id)
        if group is None:
            return True
        if group.phase is Phase.RESERVED:
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
        group.release_all(self.pool)

    def check_invariants(self) -> None:
        """Asserts that blocks are held by exactly the requests past OFFERED, and only named ones by several."""
        self.pool.check_invariants()
        assert is_safe([g.claim for g in self._groups.values() if g.num_held], self.pool.num_free)
        references: Counter[BlockId] = Counter()
        for group in self._groups.values():
            counts = Counter(b for s in group.sequences.values() for b in s.block_ids)
            counts.update((*group.prompt_blocks, *group.spare))
            assert counts == group.counts
            assert group.num_held <= group.num_most
            assert bool(group.num_held) == (group.phase > Phase.OFFERED)
            assert bool(group.sequences) == (group.phase is Phase.DELIVERED)
            assert all(len(s.output) < group.request.sampling.max_tokens for s in group.sequences.values())
            assert not references.keys() & counts.keys() - set(group.named)
            references += counts
        assert all(self.pool.num_references(block) == count for block, count in references.items())
        assert len(references) == self.pool.num_blocks - self.pool.num_free


def _output(step: DecodeStep, token: SampledToken) -> TokenStep:
    return TokenStep(
        position=step.output_position,
        token_id=token.token_id,
        finish_reason=step.request.sampling.finish_reason(token.token_id, step.output_position),
        choice=step.choice,
        logprobs=token.logprobs,
    )
