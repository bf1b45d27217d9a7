"""A worker in a process of its own whose messages go wrong, drawn from a seed; its model is `HashExecutor`.

What the process does otherwise is what a cluster's does: host, gRPC, registration, leases, a real transport.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from kv_transfer.transport import MessageHeader
from kv_transfer.transports import make_transport
from tandem.key_source import KEY_VARIABLE
from tandem.types import Epoch, Role
from tandem.worker.build import worker_facts
from tandem.worker.host import HostedWorker, Mark, WorkerHost, WorkerSettings
from tests.factories import CLUSTER_KEY
from tests.fakes import Fault, FaultyTransport
from tests.hash_executor import HashExecutor

STALL = "stalled fabric"
BROKEN = "broken link"

_WEIGHTS = {Fault.CORRUPT: 2, Fault.DROP: 1, Fault.DUPLICATE: 6, Fault.DELAY: 6, Fault.NONE: 85}


REPORT_S = 0.5
"""How often a worker says what went wrong: of one that is killed, the last word is missing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a worker says of itself."""

    faults: dict[str, int]
    """How often each kind happened since the last report."""
    num_swapped: int
    """Blocks in host memory."""


class FaultyWorker:
    """One incarnation of a worker, each with faults of its own. `lease_s` is the transfer's: some stalls are longer."""

    def __init__(self, seed: int, *, role: Role, lease_s: float) -> None:
        self._seed = seed
        self._role = role
        self._stalls_s = (0.1, 0.3, 1.5 * lease_s)
        self._stalled = False
        self._faults: Counter[str] = Counter()
        self._reported: Counter[str] = Counter()

    def fault(self, header: MessageHeader, index: int) -> Fault:
        """The transport's policy. Called from several threads; `random.Random` is safe for that."""
        fault = Fault.DELAY if self._stalled else self._random.choices(list(_WEIGHTS), weights=_WEIGHTS.values())[0]
        self._faults[fault] += 1
        return fault

    async def build(self, settings: WorkerSettings, epoch: Epoch, mark: Mark) -> HostedWorker:
        """As the pools' own: transport, model, worker."""
        import decode_pool.actor
        import prefill_pool.actor

        self._random = random.Random(f"{self._seed}/{settings.worker_id}/{epoch}")
        config, is_prefill = settings.config, self._role is Role.PREFILL
        transport = make_transport(config.transfer.transport, worker_id=settings.worker_id, host=settings.host)
        self._fabric = fabric = FaultyTransport(transport, self.fault)
        num_blocks = config.prefill.num_blocks if is_prefill else config.decode.num_blocks
        executor = HashExecutor(num_blocks=num_blocks, allocate=fabric.allocate)
        facts = worker_facts(self._role, config.model, executor, transport=fabric.name)
        assemble: Any = prefill_pool.actor.assemble if is_prefill else decode_pool.actor.assemble
        service = await assemble(settings, epoch, mark, executor=executor, transport=fabric, facts=facts)
        self._worker = service.worker
        self._trouble = asyncio.create_task(self._go_wrong())
        hosted: HostedWorker = service
        return hosted

    async def _go_wrong(self) -> None:
        """Releases what is held in another order, stalls the fabric, breaks its links; until cancelled."""
        while True:
            await asyncio.sleep(self._random.uniform(0.01, 0.05))
            self._fabric.release(self._random)
            drawn = self._random.random()
            if drawn < 0.02:
                self._stalled = True
                await asyncio.sleep(self._random.choice(self._stalls_s))
                self._stalled = False
                self._faults[STALL] += 1
            elif drawn < 0.06 and self._role is Role.PREFILL:
                self._break_links()

    def _break_links(self) -> None:
        for known in self._worker.links.links():
            known.link.close()
            self._faults[BROKEN] += 1

    def report(self) -> Report:
        """From one thread."""
        faults = Counter(self._faults)
        new, self._reported = faults - self._reported, faults
        if self._role is Role.PREFILL:
            return Report(faults=dict(new), num_swapped=0)
        with self._worker.lock:
            space = self._worker.scheduler.swap_space
            return Report(faults=dict(new), num_swapped=space.num_slots - space.num_free)

    def end(self) -> None:
        """No more faults; looks at what is left. Not on the worker's event loop."""
        self._trouble.get_loop().call_soon_threadsafe(self._trouble.cancel)
        with self._worker.lock:
            self._worker.scheduler.check_invariants()


def run(channel: Connection, role: str, settings: dict[str, Any]) -> None:
    """A `Body` of `WorkerProcess`; `settings` has a seed besides."""
    os.environ[KEY_VARIABLE] = CLUSTER_KEY.to_hex()
    own = WorkerSettings.from_mapping(settings)
    faulty = FaultyWorker(settings["seed"], role=Role(role), lease_s=own.config.transfer.lease_s)
    host = WorkerHost(own, Role(role), faulty.build)
    host.ready()
    channel.send("ready")
    while not channel.poll(REPORT_S):
        channel.send(faulty.report())
    channel.send(faulty.report())
    faulty.end()
    host.stop()
