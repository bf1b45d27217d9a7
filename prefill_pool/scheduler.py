"""Which prompt tokens the next iteration computes, and for which prompts to ask for a ticket. Pure.

Shortest remaining first with ageing (`order.py`) under a token budget, decided anew for each iteration: a long prompt
is overtaken between two of its chunks and keeps its blocks. One that finds no blocks lets only started ones pass, which
will give theirs back. A prompt passes QUEUED > OFFERED (its ticket is asked for) > READY (ticket held, or none needed)
> RUNNING (has blocks) > COMPUTED (blocks belong to the handoff until released).
Leading blocks that are cached here are not computed again; those that a `Loan` of the store offers beyond them are
loaded by whoever executes the chunk, layer by layer, before the layer needs them. A chunk's full blocks are named when
it is committed. A prompt whose loan is still being fetched is passed over.
Tickets are asked for in the same order and only where less than `ticket_lookahead_tokens` for the same decode worker
stand before a prompt, so that a full decode worker holds up nobody else's requests and no decode blocks idle behind a
long queue here.

Shape shared with the decode pool and the simulator: add / schedule / commit / abort / check_invariants.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from prefill_pool.order import PrefillOrder, due_tickets
from prefill_pool.sequence import Phase, PrefillSequence
from tandem.kv.prefix_pool import PrefixPool
from tandem.types import BlockHash, BlockId, Request, RequestId, SampledToken, TokenStep, WorkerId


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Prompt tokens `start .. start + num_tokens` of one request; `is_last` ones are sampled.

    The KV of blocks `loads` (indices into the table) must come from the store's first.
    """

    request: Request
    start: int
    num_tokens: int
    block_ids: tuple[BlockId, ...]
    is_last: bool
    loads: range = range(0)


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillPlan:
    """One iteration."""

    chunks: tuple[Chunk, ...]

    @property
    def num_tokens(self) -> int:
        """Prompt tokens in the batch."""
        return sum(chunk.num_tokens for chunk in self.chunks)


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstOutput:
    """A prompt is done: the first token of each choice, and whether it is its last."""

    request_id: RequestId
    steps: tuple[TokenStep, ...]
    num_cached: int
    """Prompt tokens that were not computed."""


_FILL = 4
"""An iteration that ends prompts takes parts of others, the last ones too, only up to this fraction of its budget: they
would lengthen it, and whoever waits for a first token gains nothing by them. Below it, a larger batch costs hardly
more. These parts and the iteration before, for whose end those prompts may have waited, have no more tokens together
than one budget."""


@dataclass(kw_only=True, slots=True)
class _Batch:
    """An iteration while it is put together."""

    budget: int
    num_before: int
    """Tokens of the iteration before."""
    chunks: list[Chunk] = field(default_factory=list)

    def room_for(self, sequence: PrefillSequence) -> int:
        """Most tokens of the next prompt in order; 0 ends the batch, so that nobody overtakes it here."""
        used = sum(chunk.num_tokens for chunk in self.chunks)
        ending = sum(chunk.num_tokens for chunk in self.chunks if chunk.is_last)
        left = self.budget - used
        is_whole = sequence.phase < Phase.RUNNING and sequence.num_expected <= left
        if is_whole or not ending:
            return left
        return max(0, min(self.budget // _FILL, ending + self.budget - self.num_before) - used)


class PrefillScheduler:
    """Owns the queue and the block pool of one prefill worker."""

    def __init__(
        self,
        pool: PrefixPool,
        *,
        block_size: int,
        max_batch_tokens: int,
        max_batch_sequences: int,
        ticket_lookahead_tokens: int,
        ageing_tokens_per_s: float,
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self._max_batch_tokens = max_batch_tokens
        self._max_batch_sequences = max_batch_sequences
        self._lookahead = ticket_lookahead_tokens
        self.order = PrefillOrder(ageing_tokens_per_s=ageing_tokens_per_s)
        self._sequences: dict[RequestId, PrefillSequence] = {}
        self._num_before = 0
        """Tokens of the newest plan."""
        self._executing: frozenset[RequestId] = frozenset()
        self._released: set[RequestId] = set()
        """Released while the batch with them in it runs: freed at commit."""

    @property
    def num_running(self) -> int:
        """Prompts in computation."""
        return sum(s.phase is Phase.RUNNING for s in self._sequences.values())

    @property
    def num_waiting(self) -> int:
        """Prompts that have not started."""
        return sum(s.phase < Phase.RUNNING for s in self._sequences.values())

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens not yet computed."""
        return sum(s.num_left for s in self._sequences.values() if s.phase < Phase.COMPUTED)

    @property
    def is_idle(self) -> bool:
        """Nothing can be scheduled until an event comes."""
        return not any(s.may_run for s in self._sequences.values())

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._sequences

    def __len__(self) -> int:
        return len(self._sequences)

    def add(self, request: Request, *, destination: WorkerId | None) -> None:
        """Queues a prompt; without a destination no ticket is needed. The caller has checked that it can ever fit."""
        assert request.request_id not in self._sequences
        phase = Phase.READY if destination is None else Phase.QUEUED
        self._sequences[request.request_id] = sequence = PrefillSequence(
            request=request, destination=destination, phase=phase
        )
        self._look_for_hits(sequence)

    def wanted_tickets(self) -> tuple[RequestId, ...]:
        """Requests to ask a ticket for now, in order; each is named once."""
        wanted = due_tickets(self.order.sort(self._sequences.values()), self._lookahead)
        for request_id in wanted:
            self._sequences[request_id].phase = Phase.OFFERED
        return wanted

    def ticket(self, request_id: RequestId) -> None:
        """The decode worker has reserved blocks for this request. Unknown ones (aborted meanwhile) are fine."""
        sequence = self._sequences.get(request_id)
        if sequence is not None and sequence.phase is Phase.OFFERED:
            sequence.phase = Phase.READY

    def fetching(self, request_id: RequestId) -> None:
        """The store has been asked for a prefix of this prompt, which waits for `fetched`."""
        sequence = self._sequences.get(request_id)
        if sequence is not None and sequence.phase < Phase.RUNNING:
            sequence.is_fetching = True

    def fetched(self, request_id: RequestId, offered: range) -> None:
        """The store has these of the prompt's blocks ready; none when it has given up."""
        sequence = self._sequences.get(request_id)
        if sequence is not None and sequence.phase < Phase.RUNNING:
            sequence.is_fetching, sequence.offered = False, offered
            self._look_for_hits(sequence)

    def _look_for_hits(self, sequence: PrefillSequence) -> None:
        names = self.usable_names(sequence.request)
        num_here = self.pool.match(names)
        sequence.num_hits = _end_of_hits(sequence.offered, num_here, len(names)) * self.block_size

    def usable_names(self, request: Request) -> tuple[BlockHash, ...]:
        """Names of blocks whose KV the prompt may take as it is: not the last one, something must be computed."""
        if request.prefix is None or request.sampling.num_prompt_logprobs is not None:
            return ()
        return request.prefix.blocks[: (len(request.prompt_token_ids) - 1) // self.block_size]

    def schedule(self, *, most_tokens: int | None = None) -> PrefillPlan:
        """The next batch, in order while budget and blocks last. May be empty.

        `most_tokens` caps this iteration further than `max_batch_tokens` does.
        """
        assert not self._executing, "the last plan has not been committed"
        budget = self._max_batch_tokens if most_tokens is None else min(most_tokens, self._max_batch_tokens)
        batch = _Batch(budget=budget, num_before=self._num_before)
        has_blocks = True
        for sequence in self.order.sort(s for s in self._sequences.values() if s.may_run):
            room = batch.room_for(sequence)
            if not room or len(batch.chunks) == self._max_batch_sequences:
                break
            loads: range | None = range(0)
            if sequence.phase is Phase.READY:
                loads = self._start(sequence) if has_blocks else None
            if loads is None:
                has_blocks = False
                continue
            batch.chunks.append(self._chunk(sequence, min(room, sequence.num_left), loads))
        self._executing = frozenset(chunk.request.request_id for chunk in batch.chunks)
        plan = PrefillPlan(chunks=tuple(batch.chunks))
        self._num_before = plan.num_tokens
        return plan

    def _start(self, sequence: PrefillSequence) -> range | None:
        """Gives a prompt all its blocks: which of them are to be loaded, or None when there are not enough."""
        num_tokens = len(sequence.request.prompt_token_ids)
        names = self.usable_names(sequence.request)
        found = self.pool.acquire(names)
        fresh = self.pool.allocate(-(-num_tokens // self.block_size) - len(found))
        if fresh is None:
            self.pool.release(found)
            return None
        sequence.block_ids, sequence.phase = found + fresh, Phase.RUNNING
        sequence.named = list(found)
        loads = range(len(found), _end_of_hits(sequence.offered, len(found), len(names)))
        sequence.num_computed = sequence.num_cached = loads.stop * self.block_size
        return loads

    def _chunk(self, sequence: PrefillSequence, num_tokens: int, loads: range) -> Chunk:
        return Chunk(
            request=sequence.request,
            start=sequence.num_computed,
            num_tokens=num_tokens,
            block_ids=sequence.block_ids,
            is_last=num_tokens == sequence.num_left,
            loads=loads,
        )

    def commit(
        self, plan: PrefillPlan, tokens: Sequence[Sequence[SampledToken]], *, elapsed_s: float = 0.0
    ) -> tuple[FirstOutput, ...]:
        """Books a plan that took `elapsed_s` to execute; `tokens` has one for each choice of each last chunk's request.

        Requests released meanwhile give no output, and their blocks are freed now.
        """
        outputs = []
        for chunk, sampled in zip(plan.chunks, tokens, strict=True):
            request_id = chunk.request.request_id
            sequence = self._sequences.get(request_id)
            if sequence is None or sequence.phase is not Phase.RUNNING or request_id in self._released:
                continue
            sequence.num_computed += chunk.num_tokens
            sequence.num_chunks += 1
            sequence.served_s += elapsed_s
            self._publish(sequence)
            if chunk.is_last:
                assert len(sampled) == chunk.request.num_choices
                sequence.phase = Phase.COMPUTED
                steps = _first_steps(chunk.request, sampled)
                outputs.append(FirstOutput(request_id=request_id, steps=steps, num_cached=sequence.num_cached))
        self._end_iteration()
        return tuple(outputs)

    def _publish(self, sequence: PrefillSequence) -> None:
        """Names what is whole now."""
        prefix = sequence.request.prefix
        num_full = sequence.num_computed // self.block_size
        if prefix is None or num_full == len(sequence.named):
            return
        num_known = len(sequence.named)
        blocks = sequence.block_ids[num_known:num_full]
        sequence.named += self.pool.publish(
            prefix.blocks[:num_full], blocks, num_known=num_known, tenant=prefix.tenant
        )

    def _end_iteration(self) -> None:
        self._executing = frozenset()
        released, self._released = self._released, set()
        for request_id in released:
            self.release(request_id)

    def abort(self, request_id: RequestId) -> None:
        """Takes a request out of computation from the next iteration on. Its blocks stay held until `release`."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            sequence.phase = Phase.COMPUTED

    def release(self, request_id: RequestId) -> None:
        """Forgets a request and frees its blocks: its handoff has ended. Idempotent.

        Blocks that the running iteration writes are freed when it is committed.
        """
        if request_id in self._executing:
            self._released.add(request_id)
            return
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self.pool.release(sequence.held)

    def num_chunks(self, request_id: RequestId) -> int:
        """Iterations that the prompt has been in."""
        return self._sequences[request_id].num_chunks

    def check_invariants(self) -> None:
        """Asserts that blocks are held by exactly the started prompts."""
        self.pool.check_invariants()
        held = Counter(b for s in self._sequences.values() for b in s.held)
        assert len(held) == self.pool.num_blocks - self.pool.num_free
        assert all(self.pool.num_references(block) == count for block, count in held.items())
        for sequence in self._sequences.values():
            assert sequence.phase >= Phase.RUNNING or not sequence.block_ids
            assert sequence.num_left >= 0


def _end_of_hits(offered: range, num_here: int, num_usable: int) -> int:
    """Leading blocks that need not be computed: those here, and those that the store offers right behind them."""
    return max(num_here, min(offered.stop, num_usable)) if offered.start <= num_here else num_here


def _first_steps(request: Request, sampled: Sequence[SampledToken]) -> tuple[TokenStep, ...]:
    return tuple(
        TokenStep(
            position=0,
            token_id=token.token_id,
            finish_reason=request.sampling.finish_reason(token.token_id, 0),
            choice=choice,
            logprobs=token.logprobs,
        )
        for choice, token in enumerate(sampled)
    )
