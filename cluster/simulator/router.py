"""The simulated router: the live one's policy, over charges and announcements that arrive at once. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from router.charges import Charge
from router.policy import Route, num_decode_blocks, route
from router.view import CachedPrefix, ClusterView, Incarnation, WorkerView
from tandem.kv.prefix_index import Batch, PrefixIndex
from tandem.kv.prefix_pool import PrefixPool
from tandem.types import BlockHash, Epoch, Request, RequestId, Role, WorkerId

_EPOCH = "1"
_TIER = "device"


@dataclass(kw_only=True, slots=True)
class _Worker:
    role: Role
    pool: PrefixPool
    charge: Charge = field(default_factory=Charge)
    num_batches: int = 0


@dataclass(kw_only=True, slots=True)
class SimulatedRouter:
    """One router, which alone gives work to the workers: it knows their load without reports."""

    block_size: int
    bad_pairs: frozenset[tuple[Incarnation, Incarnation]] = frozenset()
    """Never taken."""
    _workers: dict[WorkerId, _Worker] = field(default_factory=dict)
    _index: PrefixIndex = field(default_factory=PrefixIndex)
    _charges: dict[RequestId, tuple[Route, list[Role]]] = field(default_factory=dict)
    """Where each request went, and in which pools it still counts."""

    def know(self, worker_id: WorkerId, role: Role, pool: PrefixPool) -> None:
        """A worker is there; `pool` is what it announces."""
        self._workers[worker_id] = _Worker(role=role, pool=pool)
        self._index.reset(worker_id, epoch=_EPOCH, seq=0, tiers={})

    def route(self, request: Request, now: float) -> Route:
        """Where it goes; both workers are charged until `prefilled` and `ended`."""
        self._follow()
        names = () if request.prefix is None else request.prefix.blocks
        view = ClusterView(workers=tuple(map(self._view, self._workers)), cached=self._cached(names))
        chosen = route(view.without(frozenset(), self.bad_pairs), request, now)
        self._charges[request.request_id] = (chosen, list(Role))
        self._charge_prefill(chosen, request, 1)
        self._charge_decode(chosen, request, 1)
        return chosen

    def prefilled(self, request: Request) -> None:
        """The prefill worker has nothing to do for it any more."""
        self._charge_prefill(self._over(request, Role.PREFILL), request, -1)

    def ended(self, request: Request) -> None:
        """Nor has the decode worker; it may hear of that earlier."""
        self._charge_decode(self._over(request, Role.DECODE), request, -1)

    def _over(self, request: Request, role: Role) -> Route:
        to, left = self._charges[request.request_id]
        left.remove(role)
        if not left:
            del self._charges[request.request_id]
        return to

    def _charge_prefill(self, to: Route, request: Request, sign: int) -> None:
        num_tokens = len(request.prompt_token_ids) - to.num_cached_tokens
        self._workers[to.prefill.worker_id].charge.add(
            num_tokens=sign * num_tokens, num_blocks=0, num_requests=sign, num_cached_tokens=sign * to.num_cached_tokens
        )

    def _charge_decode(self, to: Route, request: Request, sign: int) -> None:
        if to.decode is None:
            return
        num_blocks = num_decode_blocks(request, self.block_size, num_held=to.num_held_blocks)
        self._workers[to.decode.worker_id].charge.add(
            num_tokens=0, num_blocks=sign * num_blocks, num_requests=sign, num_held_blocks=sign * to.num_held_blocks
        )

    def _follow(self) -> None:
        for worker_id, worker in self._workers.items():
            changes = worker.pool.take_changes()
            if changes.added or changes.removed:
                worker.num_batches += 1
                batch = Batch(
                    epoch=_EPOCH,
                    seq=worker.num_batches,
                    tier=_TIER,
                    added=tuple(changes.added),
                    removed=tuple(changes.removed),
                )
                assert self._index.apply(worker_id, batch)

    def _cached(self, names: tuple[BlockHash, ...]) -> Mapping[WorkerId, CachedPrefix]:
        found = self._index.match(names)
        return {WorkerId(name): CachedPrefix(device=tiers[_TIER]) for name, tiers in found.items()}

    def _view(self, worker_id: WorkerId) -> WorkerView:
        worker = self._workers[worker_id]
        return WorkerView(
            worker_id=worker_id,
            role=worker.role,
            address=worker_id,
            epoch=Epoch(1),
            fingerprint="",
            transport="ucx",
            node=worker_id,
            model="",
            max_context_tokens=worker.pool.num_blocks * self.block_size,
            num_blocks=worker.pool.num_blocks,
            block_size=self.block_size,
            num_waiting_tokens=worker.charge.num_tokens,
            num_used_blocks=worker.charge.num_blocks,
            num_requests=worker.charge.num_requests,
        )
