"""What operators ask of the pools through the router: sizes, drains, restarts. Writes desired state, nothing more.

The controller acts on it (`cluster/controller.py`). Checks what can be checked here, so that a typing error is
answered at once.
"""

from __future__ import annotations

from redis.exceptions import RedisError

from router.cache_admin import CacheAdmin
from router.dispatcher import WorkerDispatcher
from tandem.errors import InvalidRequest, RequestNotFound, WorkerUnavailable
from tandem.pool_state import MAX_POOL_SIZE, DesiredState, PoolState, SeenWorker
from tandem.rpc.tandem.v1 import inference_pb2
from tandem.types import Role, WorkerId


class PoolAdmin:
    """All methods raise WorkerUnavailable while Redis is away: sizes cannot be changed then."""

    def __init__(self, state: PoolState, dispatcher: WorkerDispatcher, cache: CacheAdmin | None = None) -> None:
        self.cache = cache
        self._state = state
        self._dispatcher = dispatcher

    async def set_sizes(self, sizes: dict[Role, int]) -> inference_pb2.PoolSizes:
        """Asks for these sizes; a role that is left out stays. Raises InvalidRequest."""
        if not sizes:
            raise InvalidRequest("name at least one pool, for example decode=2", param="prefill")
        for role, size in sizes.items():
            if not 0 <= size <= MAX_POOL_SIZE:
                raise InvalidRequest(f"{role} must be 0 to {MAX_POOL_SIZE}, got {size}", param=str(role))
        try:
            for role, size in sizes.items():
                await self._state.set_size(role, size)
            return _sizes(await self._state.get())
        except RedisError as exc:
            raise _away(exc) from exc

    async def drain(self, worker_id: WorkerId) -> None:
        """Asks that one worker be taken out and replaced. Raises RequestNotFound for one that is not registered."""
        known = [record.worker_id for record in self._dispatcher.tracker.records()]
        if worker_id not in known:
            raise RequestNotFound(
                f"no worker {worker_id!r} is registered; there are {', '.join(known) or 'none'}", param="worker_id"
            )
        try:
            await self._state.ask_drain(worker_id)
        except RedisError as exc:
            raise _away(exc) from exc

    async def restart(self, role: str) -> int:
        """Asks that every present worker of a pool be replaced; the new generation. Raises InvalidRequest."""
        if role not in tuple(Role):
            raise InvalidRequest(f"role must be {' or '.join(Role)}, got {role!r}", param="role")
        try:
            return await self._state.restart(Role(role))
        except RedisError as exc:
            raise _away(exc) from exc

    async def status(self) -> inference_pb2.ClusterStatus:
        """The dispatcher's status, with what is wanted of each pool; without it while Redis is away."""
        status = await self._dispatcher.status()
        try:
            desired = await self._state.get()
            status.has_controller = await self._state.has_controller()
        except RedisError:
            return status
        for absent in self._dispatcher.tracker.absent():
            status.workers.add(
                worker_id=absent.worker_id,
                role=absent.role,
                state=_state_of(absent),
                generation=absent.generation,
                waits_for=absent.waits_for,
            )
        for role in Role:
            pool = desired.pool(role)
            workers = [worker for worker in status.workers if worker.role == role]
            status.pools.add(
                role=role,
                desired=0 if pool is None else pool.size,
                generation=0 if pool is None else pool.generation,
                num_ready=sum(worker.state == "ready" for worker in workers),
                num_draining=sum(worker.state == "draining" for worker in workers),
                num_unplaced=sum(bool(worker.waits_for) for worker in workers),
            )
        return status


def _state_of(absent: SeenWorker) -> str:
    """Of a worker that is not registered."""
    if absent.state != "starting":
        return "lost"
    return "waiting" if absent.waits_for else "starting"


def _sizes(desired: DesiredState) -> inference_pb2.PoolSizes:
    sizes = {str(role): pool.size for role in Role if (pool := desired.pool(role)) is not None}
    return inference_pb2.PoolSizes(**sizes)


def _away(error: RedisError) -> WorkerUnavailable:
    return WorkerUnavailable(f"Redis is away, pools cannot be changed now: {error}", retry_after_s=1.0)
