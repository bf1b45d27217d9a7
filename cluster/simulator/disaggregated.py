"""Two simulated pools and the handoffs between them. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.simulator.decode import DecodeEvents, DecodeNode
from cluster.simulator.events import EventQueue
from cluster.simulator.handoff import Handoff
from cluster.simulator.life import Life
from cluster.simulator.network import Network
from cluster.simulator.plant import Plant
from cluster.simulator.prefill import PrefillEvents, PrefillNode
from cluster.simulator.router import SimulatedRouter
from cluster.simulator.usage import Listener, PoolUsage, check_is_idle, usage_of
from router.policy import Route
from tandem.types import Request, Role, WorkerId


@dataclass(kw_only=True, slots=True)
class DisaggregatedCluster:
    """Workers as `plant.config` says."""

    plant: Plant
    events: EventQueue
    listener: Listener
    router: SimulatedRouter = field(init=False)
    network: Network = field(init=False)
    _prefill: dict[WorkerId, PrefillNode] = field(default_factory=dict)
    _decode: dict[WorkerId, DecodeNode] = field(default_factory=dict)

    def __post_init__(self) -> None:
        plant, events = self.plant, self.events
        self.router = SimulatedRouter(block_size=plant.block_size)
        self.network = Network(events=events, speed=plant.link)
        prefill_on = PrefillEvents(
            wants_ticket=self._wants_ticket, first_token=self._first_token, landed=self._try_deliver
        )
        decode_on = DecodeEvents(reserved=self._reserved, token=self.listener.token, ended=self._ended)
        for index in range(plant.config.prefill.num_workers):
            name = WorkerId(f"prefill-{index}")
            self._prefill[name] = PrefillNode(
                worker_id=name, plant=plant, events=events, network=self.network, on=prefill_on
            )
            self.router.know(name, Role.PREFILL, self._prefill[name].scheduler.pool)
        for index in range(plant.config.decode.num_workers):
            name = WorkerId(f"decode-{index}")
            self._decode[name] = DecodeNode(worker_id=name, plant=plant, events=events, on=decode_on)
            self.router.know(name, Role.DECODE, self._decode[name].scheduler.pool)

    def why_refused(self, request: Request) -> str:
        """Why no worker could ever hold it; empty when one can."""
        num_prompt_blocks = -(-len(request.prompt_token_ids) // self.plant.block_size)
        if num_prompt_blocks > self.plant.config.prefill.num_blocks:
            return "prompt larger than a prefill worker's KV"
        decode = next(iter(self._decode.values())).scheduler
        if decode.num_blocks_for(request) > decode.pool.num_blocks:
            return "prompt and output larger than a decode worker's KV"
        return ""

    def submit(self, life: Life, to: Route) -> None:
        """The router has chosen: the prefill leg is opened."""
        life.prefill, handoff = to.prefill.worker_id, None
        if to.decode is not None:
            life.decode = to.decode.worker_id
            handoff = Handoff(life=life, source=life.prefill, destination=life.decode)
        node = self._prefill[life.prefill]
        self.events.after(self.plant.control_s, lambda: node.submit(life, handoff))

    def usage(self) -> dict[str, PoolUsage]:
        """Of each pool."""
        return {"prefill": usage_of(self._prefill.values()), "decode": usage_of(self._decode.values())}

    def check_is_idle(self) -> None:
        """Asserts that nobody holds a block any more."""
        for name, prefill in self._prefill.items():
            check_is_idle(prefill.scheduler, name)
        for name, decode in self._decode.items():
            check_is_idle(decode.scheduler, name)

    def _soon(self, what: Callable[[Handoff], None], handoff: Handoff) -> None:
        self.events.after(self.plant.control_s, lambda: what(handoff))

    def _wants_ticket(self, handoff: Handoff) -> None:
        self._soon(self._decode[handoff.destination].offer, handoff)

    def _reserved(self, handoff: Handoff) -> None:
        self._soon(self._prefill[handoff.source].ticket, handoff)

    def _first_token(self, life: Life, handoff: Handoff | None) -> None:
        self.listener.token(life)
        if handoff is None:
            self.router.prefilled(life.request)
            self._ended(life)
            return
        self._soon(self._computed, handoff)

    def _computed(self, handoff: Handoff) -> None:
        """The record has arrived at the decode worker."""
        handoff.is_computed = True
        self._try_deliver(handoff)

    def _try_deliver(self, handoff: Handoff) -> None:
        if handoff.is_delivered:
            self._decode[handoff.destination].deliver(handoff)
            self._soon(self._released, handoff)

    def _released(self, handoff: Handoff) -> None:
        """The source has heard that all is there."""
        self.router.prefilled(handoff.life.request)
        self._prefill[handoff.source].release(handoff.request_id)

    def _ended(self, life: Life) -> None:
        self.router.ended(life.request)
        self.listener.ended(life)
