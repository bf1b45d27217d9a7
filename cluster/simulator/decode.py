"""A simulated decode worker: the pool's own scheduler, and iterations that take what the cost model says. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.simulator.cost_model import Work
from cluster.simulator.events import EventQueue
from cluster.simulator.handoff import Handoff
from cluster.simulator.life import Life
from cluster.simulator.plant import Plant
from cluster.simulator.prefill import TOKEN
from decode_pool.plan import DecodePlan
from decode_pool.scheduler import DecodeScheduler
from tandem.kv.prefix_pool import PrefixPool
from tandem.types import RequestId, TokenStep, WorkerId

FIRST = TokenStep(position=0, token_id=TOKEN.token_id, finish_reason=None)
"""The first token of an output that goes on."""


def make_scheduler(plant: Plant, *, num_blocks: int) -> DecodeScheduler:
    """As a live worker makes it."""
    config = plant.config.decode
    return DecodeScheduler(
        PrefixPool(num_blocks),
        block_size=plant.block_size,
        max_batch_sequences=config.max_batch_sequences,
        growth_tokens=config.growth_tokens,
        num_swap_slots=config.swap_blocks,
    )


def work_of(plan: DecodePlan) -> list[Work]:
    """What a plan's steps cost."""
    return [Work(num_before=step.num_computed) for step in plan.steps]


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeEvents:
    """What a decode worker tells; called at the moment at which it happens there."""

    reserved: Callable[[Handoff], None]
    token: Callable[[Life], None]
    ended: Callable[[Life], None]


@dataclass(kw_only=True, slots=True)
class DecodeNode:
    """One worker."""

    worker_id: WorkerId
    plant: Plant
    events: EventQueue
    on: DecodeEvents
    scheduler: DecodeScheduler = field(init=False)
    busy_s: float = 0.0
    num_iterations: int = 0
    num_tokens: int = 0
    _handoffs: dict[RequestId, Handoff] = field(default_factory=dict)
    _is_busy: bool = False

    def __post_init__(self) -> None:
        self.scheduler = make_scheduler(self.plant, num_blocks=self.plant.config.decode.num_blocks)

    def offer(self, handoff: Handoff) -> None:
        """A prefill worker asks for a ticket."""
        self._handoffs[handoff.request_id] = handoff
        self.scheduler.add(handoff.life.request)
        self._reserve()

    def deliver(self, handoff: Handoff) -> None:
        """All of a prompt's KV and the first token are here."""
        self.scheduler.deliver(handoff.request_id, (FIRST,))
        self._advance()

    def _reserve(self) -> None:
        """Gives tickets to those that have blocks now."""
        for request_id in self.scheduler.reserve():
            handoff = self._handoffs[request_id]
            handoff.first_block = self.scheduler.reservation(request_id).num_found
            self.on.reserved(handoff)
        self._advance()

    def _advance(self) -> None:
        if self._is_busy:
            return
        plan = self.scheduler.schedule()
        if not plan.is_empty:
            self._is_busy = True
            elapsed_s = self._seconds(plan)
            self.events.after(elapsed_s, lambda: self._commit(plan, elapsed_s))
        if self.scheduler.has_reserved:
            self.events.after(0.0, self._reserve)

    def _seconds(self, plan: DecodePlan) -> float:
        plant = self.plant
        num_moved = len(plan.ins) + len(plan.outs)
        moved_bytes = num_moved * plant.block_size * plant.model.token_bytes
        move_s = moved_bytes / plant.device.host_bytes_per_s / plant.config.decode.tensor_parallel
        return move_s + (plant.decode_cost.iteration_s(work_of(plan)) if plan.steps else 0.0)

    def _commit(self, plan: DecodePlan, elapsed_s: float) -> None:
        self._is_busy = False
        self.busy_s += elapsed_s
        self.num_iterations += bool(plan.steps)
        self.num_tokens += len(plan.steps)
        for output in self.scheduler.commit(plan, [TOKEN] * len(plan.steps)):
            life = self._handoffs[output.request_id].life
            self.on.token(life)
            if output.is_last:
                del self._handoffs[output.request_id]
                self.on.ended(life)
        self._reserve()
