"""What disaggregation is compared with: workers that prefill and decode in one batch. Pure.

Each has both pools' own schedulers. An iteration decodes first and fills what is left of the token budget with chunks
of prompts (chunked prefill), so a decode never waits for more than one iteration. A prompt's KV stays where it is,
though it moves from the one scheduler's share of the blocks (a quarter) to the other's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from cluster.simulator import decode, prefill
from cluster.simulator.events import EventQueue
from cluster.simulator.life import Life
from cluster.simulator.network import Network
from cluster.simulator.plant import Plant
from cluster.simulator.router import SimulatedRouter
from cluster.simulator.usage import Listener, PoolUsage, check_is_idle, usage_of
from decode_pool.plan import DecodePlan
from decode_pool.scheduler import DecodeScheduler
from prefill_pool.pace import Pace
from prefill_pool.scheduler import FirstOutput, PrefillPlan, PrefillScheduler
from router.policy import Route
from tandem.types import Epoch, Request, RequestId, Role, WorkerId

PREFILL_SHARE = 4
"""One block in this many is for prompts that are being computed."""


@dataclass(kw_only=True, slots=True)
class ColocatedNode:
    """One worker."""

    plant: Plant
    events: EventQueue
    router: SimulatedRouter
    listener: Listener
    prefill: PrefillScheduler = field(init=False)
    decode: DecodeScheduler = field(init=False)
    busy_s: float = 0.0
    num_iterations: int = 0
    num_tokens: int = 0
    _pace: Pace = field(init=False)
    _lives: dict[RequestId, Life] = field(default_factory=dict)
    _is_busy: bool = False

    def __post_init__(self) -> None:
        num_blocks = self.plant.config.decode.num_blocks
        num_prefill_blocks = num_blocks // PREFILL_SHARE
        self.prefill = prefill.make_scheduler(self.plant, num_blocks=num_prefill_blocks)
        self.decode = decode.make_scheduler(self.plant, num_blocks=num_blocks - num_prefill_blocks)
        self._pace = prefill.make_pace(self.plant)

    def submit(self, life: Life) -> None:
        """A request arrives."""
        self._lives[life.request.request_id] = life
        self.prefill.add(life.request, destination=None)
        self._advance()

    def _advance(self) -> None:
        if self._is_busy:
            return
        decoding = self.decode.schedule()
        self._move_in()
        room = self._pace.budget - len(decoding.steps)
        prefilling = self.prefill.schedule(most_tokens=max(self.plant.block_size, room))
        work = [*prefill.work_of(prefilling), *decode.work_of(decoding)]
        if decoding.is_empty and not work:
            self.prefill.commit(prefilling, ())
            self.decode.commit(decoding, ())
            return
        self._is_busy = True
        num_moved = len(decoding.ins) + len(decoding.outs)
        moved_bytes = num_moved * self.plant.block_size * self.plant.model.token_bytes
        elapsed_s = moved_bytes / self.plant.device.host_bytes_per_s
        elapsed_s += self.plant.decode_cost.iteration_s(work) if work else 0.0
        for chunk in prefilling.chunks:
            life = self._lives[chunk.request.request_id]
            if math.isnan(life.prefill_started_s):
                life.prefill_started_s = self.events.now
        self.events.after(elapsed_s, lambda: self._commit(prefilling, decoding, elapsed_s))

    def _commit(self, prefilling: PrefillPlan, decoding: DecodePlan, elapsed_s: float) -> None:
        self._is_busy = False
        self.busy_s += elapsed_s
        self.num_iterations += 1
        self.num_tokens += prefilling.num_tokens + len(decoding.steps)
        if prefilling.chunks:
            self._pace.observe(prefilling.num_tokens + len(decoding.steps), elapsed_s)
        for output in self.decode.commit(decoding, [prefill.TOKEN] * len(decoding.steps)):
            life = self._lives[output.request_id]
            self.listener.token(life)
            if output.is_last:
                self._end(life)
        tokens = [(prefill.TOKEN,) if chunk.is_last else () for chunk in prefilling.chunks]
        for first in self.prefill.commit(prefilling, tokens, elapsed_s=elapsed_s):
            self._first(first)
        self._move_in()
        self._advance()

    def _first(self, output: FirstOutput) -> None:
        life = self._lives[output.request_id]
        life.prefill_ended_s, life.num_cached_tokens = self.events.now, output.num_cached
        self.listener.token(life)
        if life.request.sampling.max_tokens == 1:
            self.prefill.release(output.request_id)
            self.router.prefilled(life.request)
            self._end(life)
        else:
            self.decode.add(life.request)

    def _move_in(self) -> None:
        """Prompts that are computed go on as soon as the other share has room."""
        for request_id in self.decode.reserve():
            self.decode.deliver(request_id, (decode.FIRST,))
            self.prefill.release(request_id)
            self.router.prefilled(self._lives[request_id].request)

    def _end(self, life: Life) -> None:
        del self._lives[life.request.request_id]
        self.router.ended(life.request)
        self.listener.ended(life)


@dataclass(kw_only=True, slots=True)
class ColocatedCluster:
    """As many workers as both pools have together, all alike, each cut as a decode worker."""

    plant: Plant
    events: EventQueue
    listener: Listener
    router: SimulatedRouter = field(init=False)
    network: Network = field(init=False)
    _nodes: dict[WorkerId, ColocatedNode] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = self.plant.config
        count = config.prefill.num_workers + config.decode.num_workers
        names = [(WorkerId(f"prefill-{index}"), WorkerId(f"decode-{index}")) for index in range(count)]
        apart = frozenset(
            ((one, Epoch(1)), (other, Epoch(1))) for one, own in names for _, other in names if other != own
        )
        self.router = SimulatedRouter(block_size=self.plant.block_size, bad_pairs=apart)
        self.network = Network(events=self.events, speed=self.plant.link)
        for as_prefill, as_decode in names:
            node = ColocatedNode(plant=self.plant, events=self.events, router=self.router, listener=self.listener)
            self._nodes[as_prefill] = node
            self.router.know(as_prefill, Role.PREFILL, node.prefill.pool)
            self.router.know(as_decode, Role.DECODE, node.decode.pool)

    def why_refused(self, request: Request) -> str:
        """Why no worker could ever hold it; empty when one can."""
        node = next(iter(self._nodes.values()))
        num_prompt_blocks = -(-len(request.prompt_token_ids) // self.plant.block_size)
        if num_prompt_blocks > node.prefill.pool.num_blocks:
            return "prompt larger than what a worker has for prompts"
        if node.decode.num_blocks_for(request) > node.decode.pool.num_blocks:
            return "prompt and output larger than a worker's KV"
        return ""

    def submit(self, life: Life, to: Route) -> None:
        """The router has chosen."""
        life.prefill = to.prefill.worker_id
        life.decode = None if to.decode is None else to.decode.worker_id
        node = self._nodes[life.prefill]
        self.events.after(self.plant.control_s, lambda: node.submit(life))

    def usage(self) -> dict[str, PoolUsage]:
        """Of the one pool."""
        return {"colocated": usage_of(self._nodes.values())}

    def check_is_idle(self) -> None:
        """Asserts that nobody holds a block any more."""
        for name, node in self._nodes.items():
            check_is_idle(node.prefill, name)
            check_is_idle(node.decode, name)
