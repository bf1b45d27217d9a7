"""What the router believes of the cluster at one moment: immutable, made by `tracker.py`, read by `policy.py`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from tandem.types import Epoch, Role, WorkerId

Incarnation = tuple[WorkerId, Epoch]
"""One life of a worker: its successor has its id, and is no worse for what the earlier one did."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerView:
    """One worker that may be given requests.

    Loads are what this router itself has given it and not seen end, plus what the worker's report shows beyond that.
    """

    worker_id: WorkerId
    role: Role
    address: str
    epoch: Epoch
    fingerprint: str
    transport: str
    node: str
    """Host name; the shared-memory transport reaches no other."""
    model: str
    max_context_tokens: int
    num_blocks: int
    block_size: int
    num_waiting_tokens: int
    """Prompt tokens not yet prefilled (prefill workers)."""
    num_used_blocks: int
    """Blocks reserved, or asked for by requests on their way (decode workers)."""
    num_requests: int
    """Requests of this router on the worker."""
    model_context_tokens: int = 0
    """What the model itself could take; 0 where that is not known."""
    store_node: str = ""
    """The node whose prefix store it uses."""

    @property
    def incarnation(self) -> Incarnation:
        """This life of the worker."""
        return self.worker_id, self.epoch


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedPrefix:
    """How many leading blocks of a prompt a worker can have without computing them; counts include those before."""

    device: int = 0
    """In its own memory."""
    host: int = 0
    """With its node's memory."""
    disk: int = 0
    """With its node's disk."""
    remote: int = 0
    """With other nodes' memory."""


NOTHING_CACHED = CachedPrefix()


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterView:
    """All workers that may be given requests."""

    workers: tuple[WorkerView, ...]
    cached: Mapping[WorkerId, CachedPrefix] = field(default_factory=dict)
    """What is cached of the prompt at hand."""
    coming: frozenset[Role] = frozenset()
    """Pools of which some worker that takes no requests now is being started, also again."""
    bad_workers: frozenset[Incarnation] = frozenset()
    bad_pairs: frozenset[tuple[Incarnation, Incarnation]] = frozenset()
    """What the request at hand has already failed on."""

    def without(
        self, workers: AbstractSet[Incarnation], pairs: AbstractSet[tuple[Incarnation, Incarnation]]
    ) -> ClusterView:
        """The same cluster for a request that has already failed on these."""
        return replace(self, bad_workers=frozenset(workers), bad_pairs=frozenset(pairs))

    def may_recover(self) -> bool:
        """Whether it is worth waiting: a worker is coming, and no pool has neither one that is good nor one coming."""
        good = {worker.role for worker in self.workers if worker.incarnation not in self.bad_workers}
        return bool(self.coming) and all(role in good or role in self.coming for role in Role)

    def cached_at(self, worker_id: WorkerId) -> CachedPrefix:
        """What a worker has of the prompt at hand."""
        return self.cached.get(worker_id, NOTHING_CACHED)

    def pairs(self) -> list[tuple[WorkerView, WorkerView]]:
        """(prefill, decode) pairs that may exchange KV: same model, same layout, a transport that joins them."""
        return [
            (prefill, decode)
            for prefill in self.workers
            if prefill.role is Role.PREFILL
            for decode in self.workers
            if decode.role is Role.DECODE
            and decode.fingerprint == prefill.fingerprint
            and decode.transport == prefill.transport
            and (prefill.transport != "shm" or decode.node == prefill.node)
            and not {prefill.incarnation, decode.incarnation} & self.bad_workers
            and (prefill.incarnation, decode.incarnation) not in self.bad_pairs
        ]
