"""A simulated prefill worker: the pool's own scheduler, its pace, and messages posted as layers are computed. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.simulator.cost_model import Work
from cluster.simulator.events import EventQueue
from cluster.simulator.handoff import Handoff, Message
from cluster.simulator.life import Life
from cluster.simulator.network import Network
from cluster.simulator.plant import Plant
from kv_transfer.sizing import POST_S, layer_groups, message_layers
from prefill_pool.pace import Pace
from prefill_pool.scheduler import Chunk, FirstOutput, PrefillPlan, PrefillScheduler
from prefill_pool.shipping import blocks_after, sized_chunk
from tandem.kv.prefix_pool import PrefixPool
from tandem.types import RequestId, SampledToken, WorkerId

TOKEN = SampledToken(token_id=0)
"""What every simulated token is: it ends no output before its length."""


def make_scheduler(plant: Plant, *, num_blocks: int) -> PrefillScheduler:
    """As a live worker makes it."""
    config = plant.config.prefill
    return PrefillScheduler(
        PrefixPool(num_blocks),
        block_size=plant.block_size,
        max_batch_tokens=config.max_batch_tokens,
        max_batch_sequences=config.max_batch_sequences,
        ticket_lookahead_tokens=config.ticket_lookahead_tokens,
        ageing_tokens_per_s=config.ageing_tokens_per_s,
    )


def make_pace(plant: Plant) -> Pace:
    """As a live worker makes it."""
    config = plant.config.prefill
    return Pace(
        max_iteration_s=config.max_iteration_ms / 1e3,
        block_size=plant.block_size,
        max_batch_tokens=config.max_batch_tokens,
    )


def work_of(plan: PrefillPlan) -> list[Work]:
    """What a plan costs."""
    return [Work(num_before=chunk.start, num_tokens=chunk.num_tokens) for chunk in plan.chunks]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillEvents:
    """What a prefill worker tells; called at the moment at which it happens there."""

    wants_ticket: Callable[[Handoff], None]
    first_token: Callable[[Life, Handoff | None], None]
    landed: Callable[[Handoff], None]


@dataclass(kw_only=True, slots=True)
class PrefillNode:
    """One worker."""

    worker_id: WorkerId
    plant: Plant
    events: EventQueue
    network: Network
    on: PrefillEvents
    scheduler: PrefillScheduler = field(init=False)
    busy_s: float = 0.0
    num_iterations: int = 0
    num_tokens: int = 0
    _pace: Pace = field(init=False)
    _lives: dict[RequestId, Life] = field(default_factory=dict)
    _handoffs: dict[RequestId, Handoff] = field(default_factory=dict)
    _is_busy: bool = False

    def __post_init__(self) -> None:
        self.scheduler = make_scheduler(self.plant, num_blocks=self.plant.config.prefill.num_blocks)
        self._pace = make_pace(self.plant)

    def submit(self, life: Life, handoff: Handoff | None) -> None:
        """A request arrives; without a handoff it ends with its first token."""
        request_id = life.request.request_id
        self._lives[request_id] = life
        if handoff is not None:
            self._handoffs[request_id] = handoff
        self.scheduler.add(life.request, destination=None if handoff is None else handoff.destination)
        self.advance()

    def ticket(self, handoff: Handoff) -> None:
        """The decode worker has reserved blocks."""
        self.scheduler.ticket(handoff.request_id)
        self.advance()

    def release(self, request_id: RequestId) -> None:
        """A request's blocks are needed no more."""
        self.scheduler.release(request_id)
        del self._lives[request_id]
        self._handoffs.pop(request_id, None)
        self.advance()

    def advance(self) -> None:
        """Asks for the tickets that are due, and starts an iteration when none runs."""
        for request_id in self.scheduler.wanted_tickets():
            self.on.wants_ticket(self._handoffs[request_id])
        if self._is_busy:
            return
        plan = self.scheduler.schedule(most_tokens=self._pace.budget)
        if plan.chunks:
            self._run(plan)

    def _run(self, plan: PrefillPlan) -> None:
        self._is_busy = True
        messages = [
            (handoff, message) for handoff, chunk in self._shipped(plan) for message in self._cut(handoff, chunk, plan)
        ]
        elapsed_s = self.plant.prefill_cost.iteration_s(work_of(plan)) + POST_S * len(messages)
        started_s, layer_s = self.events.now, elapsed_s / self.plant.model.num_layers
        for chunk in plan.chunks:
            life = self._lives[chunk.request.request_id]
            if math.isnan(life.prefill_started_s):
                life.prefill_started_s = started_s
        for handoff, message in messages:
            posted_s = started_s + (message.last_layer + 1) * layer_s
            self.events.at(posted_s, lambda handoff=handoff, message=message: self._post(handoff, message))  # type: ignore[misc]
        self.events.after(elapsed_s, lambda: self._commit(plan, elapsed_s))

    def _shipped(self, plan: PrefillPlan) -> list[tuple[Handoff, Chunk]]:
        found = ((self._handoffs.get(chunk.request.request_id), chunk) for chunk in plan.chunks)
        return [(handoff, chunk) for handoff, chunk in found if handoff is not None]

    def _cut(self, handoff: Handoff, chunk: Chunk, plan: PrefillPlan) -> list[Message]:
        """The messages of a chunk: sized as a live worker sizes them, from its pace and the link's speed."""
        share = self.plant.kv_share
        num_blocks = blocks_after(chunk, share.block_size)
        num_sent, num_held = handoff.advance(num_blocks)
        handoff.life.num_held_bytes += num_held * share.num_layers * share.block_layer_bytes
        if not num_sent:
            return []
        token_s, num_layers = self._pace.token_s, share.num_layers
        layer_s = token_s / num_layers * plan.num_tokens
        sized = sized_chunk(chunk, share, num_blocks=num_sent, token_s=token_s, layer_s=layer_s)
        fixed = self.plant.config.transfer.layers_per_message
        size = min(num_layers, message_layers(sized, self.network.speed, fixed=fixed))
        handoff.num_under_way += len(groups := layer_groups(num_layers, size))
        return [Message(last_layer=first + count - 1, num_layers=count, num_blocks=num_sent) for first, count in groups]

    def _post(self, handoff: Handoff, message: Message) -> None:
        num_bytes = message.num_layers * message.num_blocks * self.plant.kv_share.block_layer_bytes
        handoff.life.num_messages += 1
        handoff.life.num_sent_bytes += num_bytes

        def landed() -> None:
            handoff.num_under_way -= 1
            handoff.life.transfer_ended_s = self.events.now
            self.on.landed(handoff)

        self.network.send(handoff.source, handoff.destination, num_bytes, landed)

    def _commit(self, plan: PrefillPlan, elapsed_s: float) -> None:
        self._is_busy = False
        self.busy_s += elapsed_s
        self.num_iterations += 1
        self.num_tokens += plan.num_tokens
        self._pace.observe(plan.num_tokens, elapsed_s)
        tokens = [(TOKEN,) if chunk.is_last else () for chunk in plan.chunks]
        for output in self.scheduler.commit(plan, tokens, elapsed_s=elapsed_s):
            self._first(output)
        self.advance()

    def _first(self, output: FirstOutput) -> None:
        life, handoff = self._lives[output.request_id], self._handoffs.get(output.request_id)
        life.prefill_ended_s = self.events.now
        life.num_cached_tokens = output.num_cached
        if handoff is None:
            self.scheduler.release(output.request_id)
            del self._lives[output.request_id]
        self.on.first_token(life, handoff)
