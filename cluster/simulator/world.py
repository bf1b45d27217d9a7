"""One simulation: arrivals into a cluster, and what became of each request. Pure.

Schedulers, routing policy, block pools, the index of prefixes, the choice of layers in a message and the pace that it
is made from are the live system's own modules, not copies. Simulated are time, bytes, and the processes around.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from cluster.simulator.colocated import ColocatedCluster
from cluster.simulator.disaggregated import DisaggregatedCluster
from cluster.simulator.events import EventQueue
from cluster.simulator.life import Life
from cluster.simulator.network import Network
from cluster.simulator.plant import Plant
from cluster.simulator.router import SimulatedRouter
from cluster.simulator.usage import Listener, PoolUsage
from cluster.simulator.workload import Arrival
from router.policy import Route
from tandem.kv.hashing import CacheIdentity, root_hash
from tandem.types import PromptPrefix, Request, RequestId, SamplingParams

OVERLOADED = "router.max_running_requests are open"
"""Why a request is not taken that would be at another time."""


class SimulatedCluster(Protocol):
    """Some workers behind one router."""

    router: SimulatedRouter
    network: Network

    def why_refused(self, request: Request) -> str:
        """Why no worker could ever hold it; empty when one can."""

    def submit(self, life: Life, to: Route) -> None:
        """Takes a request where the router sends it."""

    def usage(self) -> dict[str, PoolUsage]:
        """Of each pool."""

    def check_is_idle(self) -> None:
        """Asserts that nobody holds a block any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """All that a simulation says. `lives` are in order of arrival, without their tokens."""

    plant: Plant
    lives: tuple[Life, ...]
    gaps_s: array[float]
    """Time between two tokens of one request, for every token but first ones."""
    duration_s: float
    usage: dict[str, PoolUsage]
    num_sent_bytes: float
    num_messages: int
    is_colocated: bool


class World:
    """Runs once."""

    def __init__(self, plant: Plant, *, is_colocated: bool = False) -> None:
        self._plant = plant
        self._is_colocated = is_colocated
        self._events = EventQueue()
        self._gaps_s = array("d")
        make = ColocatedCluster if is_colocated else DisaggregatedCluster
        listener = Listener(token=self._token, ended=self._ended)
        self._cluster: SimulatedCluster = make(plant=plant, events=self._events, listener=listener)
        identity = CacheIdentity(fingerprint=plant.model.name)
        self._root = root_hash(identity)
        self._lives: list[Life] = []
        self._num_open = 0

    def run(self, arrivals: Sequence[Arrival]) -> Outcome:
        """Until every request has ended."""
        for number, arrival in enumerate(sorted(arrivals, key=lambda arrival: arrival.at_s)):
            self._events.at(arrival.at_s, lambda number=number, arrival=arrival: self._arrive(number, arrival))  # type: ignore[misc]
        self._events.run()
        self._cluster.check_is_idle()
        assert all(life.is_complete or life.refused for life in self._lives)
        return Outcome(
            plant=self._plant,
            lives=tuple(self._lives),
            gaps_s=self._gaps_s,
            duration_s=max((life.ended_s for life in self._lives if life.is_complete), default=0.0),
            usage=self._cluster.usage(),
            num_sent_bytes=self._cluster.network.num_bytes,
            num_messages=self._cluster.network.num_messages,
            is_colocated=self._is_colocated,
        )

    def _arrive(self, number: int, arrival: Arrival) -> None:
        refused = self._why_not_admitted(arrival)
        known = replace(arrival, num_prompt_tokens=0, prefix_ids=()) if refused else arrival
        request = self._request(number, known)
        refused = refused or self._cluster.why_refused(request)
        life = Life(request=request, num_prompt_tokens=arrival.num_prompt_tokens, refused=refused)
        self._lives.append(life)
        if refused:
            _forget_tokens(life)
            return
        self._num_open += 1
        self._cluster.submit(life, self._cluster.router.route(request, self._events.now))

    def _why_not_admitted(self, arrival: Arrival) -> str:
        """What needs no look at its tokens: a prompt larger than all of a worker's blocks is never written out."""
        config = self._plant.config
        num_tokens = arrival.num_prompt_tokens + arrival.num_output_tokens
        if num_tokens > (config.model.max_context_tokens or math.inf):
            return "prompt and output larger than model.max_context_tokens"
        num_blocks = max(config.prefill.num_blocks, config.decode.num_blocks)
        if arrival.num_prompt_tokens > num_blocks * self._plant.block_size:
            return "prompt larger than any worker's KV"
        return OVERLOADED if self._num_open >= config.router.max_running_requests else ""

    def _request(self, number: int, arrival: Arrival) -> Request:
        names = arrival.block_names(self._plant.block_size, number=number)
        keeps = self._plant.config.prefix_store.enabled
        return Request(
            request_id=RequestId(f"{number:08d}"),
            prompt_token_ids=(0,) * arrival.num_prompt_tokens,
            sampling=SamplingParams(max_tokens=arrival.num_output_tokens),
            arrival_s=self._events.now,
            deadline_s=math.inf,
            prefix=PromptPrefix(root=self._root, blocks=names) if keeps else None,
        )

    def _token(self, life: Life) -> None:
        """A token leaves its worker: the client has it a little later."""
        gap_s = life.token(self._events.now + self._plant.control_s)
        if not math.isnan(gap_s):
            self._gaps_s.append(gap_s)

    def _ended(self, life: Life) -> None:
        self._num_open -= 1
        life.ended_s = life.newest_token_s
        _forget_tokens(life)


def _forget_tokens(life: Life) -> None:
    """A trace's prompts together take gigabytes."""
    life.request = replace(life.request, prompt_token_ids=(), prefix=None)
