"""Continuous batching for decode: which sequences hold blocks, and which take part in the next iteration. Pure.

A sequence passes OFFERED (waits for blocks, first come, first served) > RESERVED (holds the blocks of its prompt and of
the first part of its output; its KV is moving in) > READY (delivered) > RUNNING. Running sequences grow by a few blocks
at a time. Every grant, to an offer or to a running sequence, keeps the pool in a safe state (`safety.py`), so that all
can finish whatever length their outputs take: nothing is preempted, dropped or deadlocked. Where a grant would not be
safe, an offer waits in the queue and a running sequence skips iterations until others give blocks back.
Sequences join and leave at every iteration.

Shape shared with the prefill pool and the simulator: add / schedule / commit / abort / check_invariants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from decode_pool.safety import Claim, is_safe
from tandem.kv.block_pool import BlockPool
from tandem.types import BlockId, FinishReason, Request, RequestId


class Phase(IntEnum):
    """How far a sequence has come."""

    OFFERED = 0
    RESERVED = 1
    READY = 2
    RUNNING = 3


@dataclass(kw_only=True, slots=True)
class DecodeSequence:
    """A request being decoded."""

    request: Request
    phase: Phase = Phase.OFFERED
    block_ids: tuple[BlockId, ...] = ()
    output: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeStep:
    """One token of one sequence: `token_id` is at context position `num_computed`, its successor is sampled."""

    request: Request
    token_id: int
    num_computed: int
    output_position: int
    block_ids: tuple[BlockId, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodePlan:
    """One iteration. `admitted` are in it for the first time."""

    steps: tuple[DecodeStep, ...]
    admitted: tuple[RequestId, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeOutput:
    """One output token; with a finish reason the sequence is over and its blocks are free."""

    request_id: RequestId
    position: int
    token_id: int
    finish_reason: FinishReason | None


class DecodeScheduler:
    """Owns the queue and the block pool of one decode worker."""

    def __init__(
        self, pool: BlockPool, *, block_size: int, max_batch_sequences: int, growth_tokens: int = 256
    ) -> None:
        self.pool = pool
        self._block_size = block_size
        self._growth_blocks = max(1, growth_tokens // block_size)
        self._max_batch_sequences = max_batch_sequences
        self._sequences: dict[RequestId, DecodeSequence] = {}
        self._executing: frozenset[RequestId] = frozenset()
        self._released: set[RequestId] = set()
        """Released while the batch with them in it runs: freed at commit."""

    @property
    def num_running(self) -> int:
        """Sequences in the batch or about to join it."""
        return sum(s.phase >= Phase.READY for s in self._sequences.values())

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for blocks or for their KV."""
        return sum(s.phase < Phase.READY for s in self._sequences.values())

    @property
    def num_unreserved(self) -> int:
        """Sequences that wait for blocks."""
        return sum(s.phase is Phase.OFFERED for s in self._sequences.values())

    @property
    def is_idle(self) -> bool:
        """Nothing can be scheduled until an event comes."""
        return not self.num_running

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._sequences

    def __len__(self) -> int:
        return len(self._sequences)

    def num_blocks_for(self, request: Request) -> int:
        """Most blocks that prompt and output can need: the last output token's own KV is never written."""
        return -(-(len(request.prompt_token_ids) + request.sampling.max_tokens - 1) // self._block_size)

    def _num_first_blocks(self, request: Request) -> int:
        """Blocks reserved before a byte moves: the prompt, and room for the output to begin."""
        num_prompt_blocks = -(-len(request.prompt_token_ids) // self._block_size)
        return min(self.num_blocks_for(request), num_prompt_blocks + self._growth_blocks)

    def _grant(self, sequence: DecodeSequence, num_blocks: int) -> bool:
        """Gives a sequence `num_blocks` more if all can still finish then."""
        if not self.pool.can_allocate(num_blocks):
            return False
        claims = [self._claim(s) for s in self._sequences.values() if s.block_ids and s is not sequence]
        most = self.num_blocks_for(sequence.request)
        claims.append(Claim(num_held=len(sequence.block_ids) + num_blocks, num_most=most))
        if not is_safe(claims, self.pool.num_free - num_blocks):
            return False
        blocks = self.pool.allocate(num_blocks)
        assert blocks is not None
        sequence.block_ids += blocks
        return True

    def _claim(self, sequence: DecodeSequence) -> Claim:
        return Claim(num_held=len(sequence.block_ids), num_most=self.num_blocks_for(sequence.request))

    def add(self, request: Request) -> None:
        """Queues a handoff offer. The caller has checked that it can ever fit."""
        assert request.request_id not in self._sequences
        assert self.num_blocks_for(request) <= self.pool.num_blocks
        self._sequences[request.request_id] = DecodeSequence(request=request)

    def reserve(self) -> tuple[RequestId, ...]:
        """Reserves blocks for the oldest offers while there are enough; returns those that now hold them."""
        reserved = []
        for request_id, sequence in self._sequences.items():
            if sequence.phase is not Phase.OFFERED:
                continue
            if not self._grant(sequence, self._num_first_blocks(sequence.request)):
                break
            sequence.phase = Phase.RESERVED
            reserved.append(request_id)
        return tuple(reserved)

    def block_ids(self, request_id: RequestId) -> tuple[BlockId, ...]:
        """The block table of a sequence that holds blocks."""
        return self._sequences[request_id].block_ids

    def deliver(self, request_id: RequestId, first_token_id: int) -> None:
        """Prompt KV and first token are here: the sequence joins at the next iteration. It must hold blocks."""
        sequence = self._sequences[request_id]
        assert sequence.phase is Phase.RESERVED
        sequence.output.append(first_token_id)
        sequence.phase = Phase.READY

    def schedule(self) -> DecodePlan:
        """The next batch: what runs and has room for a token, then ready sequences in order. May be empty."""
        assert not self._executing, "the last plan has not been committed"
        running = [s for s in self._sequences.values() if s.phase is Phase.RUNNING]
        ready = [s for s in self._sequences.values() if s.phase is Phase.READY]
        admitted = ready[: max(0, self._max_batch_sequences - len(running))]
        for sequence in admitted:
            sequence.phase = Phase.RUNNING
        steps = tuple(self._step(sequence) for sequence in [*running, *admitted] if self._has_room(sequence))
        self._executing = frozenset(step.request.request_id for step in steps)
        return DecodePlan(steps=steps, admitted=tuple(s.request.request_id for s in admitted))

    def _has_room(self, sequence: DecodeSequence) -> bool:
        """Whether the newest token's KV has a block, growing the sequence if need be and if that is safe."""
        num_tokens = len(sequence.request.prompt_token_ids) + len(sequence.output)
        if num_tokens <= len(sequence.block_ids) * self._block_size:
            return True
        left = self.num_blocks_for(sequence.request) - len(sequence.block_ids)
        return self._grant(sequence, min(left, self._growth_blocks)) or self._grant(sequence, 1)

    def _step(self, sequence: DecodeSequence) -> DecodeStep:
        num_output = len(sequence.output)
        return DecodeStep(
            request=sequence.request,
            token_id=sequence.output[-1],
            num_computed=len(sequence.request.prompt_token_ids) + num_output - 1,
            output_position=num_output,
            block_ids=sequence.block_ids,
        )

    def commit(self, plan: DecodePlan, tokens: Sequence[int]) -> tuple[DecodeOutput, ...]:
        """Books an executed plan. Finished sequences leave, and so do those released meanwhile, without output."""
        self._executing = frozenset()
        outputs = []
        for step, token in zip(plan.steps, tokens, strict=True):
            request_id = step.request.request_id
            if request_id in self._released:
                self.release(request_id)
                continue
            self._sequences[request_id].output.append(token)
            reason = step.request.sampling.finish_reason(token, step.output_position)
            outputs.append(
                DecodeOutput(
                    request_id=request_id, position=step.output_position, token_id=token, finish_reason=reason
                )
            )
            if reason is not None:
                self.release(request_id)
        self._released.clear()
        return tuple(outputs)

    def abort(self, request_id: RequestId) -> bool:
        """Ends a sequence that owns its blocks (READY or RUNNING), or that has none yet (OFFERED).

        False for RESERVED ones: their blocks belong to the handoff, which calls `release` when it has drained.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return True
        if sequence.phase is Phase.RESERVED:
            return False
        self.release(request_id)
        return True

    def release(self, request_id: RequestId) -> None:
        """Forgets a sequence and frees its blocks. Idempotent.

        Blocks that the running iteration writes are freed when it is committed.
        """
        if request_id in self._executing:
            self._released.add(request_id)
            return
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self.pool.release(sequence.block_ids)

    def check_invariants(self) -> None:
        """Asserts that blocks are held by exactly the sequences past OFFERED."""
        self.pool.check_invariants()
        assert is_safe([self._claim(s) for s in self._sequences.values() if s.block_ids], self.pool.num_free)
        held = [b for s in self._sequences.values() for b in s.block_ids]
        assert len(held) == len(set(held)) == self.pool.num_blocks - self.pool.num_free
        for sequence in self._sequences.values():
            assert bool(sequence.block_ids) == (sequence.phase > Phase.OFFERED)
            assert len(sequence.block_ids) <= self.num_blocks_for(sequence.request)
            assert len(sequence.output) < sequence.request.sampling.max_tokens
