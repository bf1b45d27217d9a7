"""The controller against a real Valkey, with workers that start slowly, fail, die and hang."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from cluster.controller import Controller
from cluster.controller_settings import ControllerEvents, ControllerSettings
from cluster.embedded_redis import EmbeddedRedis
from cluster.scaling import Limits
from tandem.errors import TandemError
from tandem.pool_state import DesiredPool, PoolState
from tandem.registry import Registry, WorkerRecord
from tandem.types import Role, WorkerId
from tests.cluster.fake_pools import FakePools

LIMITS = Limits(lost_s=0.3, first_backoff_s=0.05, longest_backoff_s=0.2)
P, D = Role.PREFILL, Role.DECODE


class Recorder(ControllerEvents):
    """Keeps failures and notes."""

    def __init__(self) -> None:
        self.failures: list[str] = []
        self.notes: list[str] = []

    def failed(self, worker_id: WorkerId, error: TandemError) -> None:
        self.failures.append(worker_id)

    def note(self, text: str) -> None:
        self.notes.append(text)


@dataclass
class World:
    """One Valkey, one set of workers, and controllers over them."""

    server: EmbeddedRedis
    state: PoolState
    registry: Registry
    pools: FakePools
    events: Recorder = field(default_factory=Recorder)

    def controller(self, holder: str = "a", *, drain_timeout_s: float = 5.0, lease_s: float = 0.5) -> Controller:
        settings = ControllerSettings(
            sizes={P: 1, D: 1},
            drain_timeout_s=drain_timeout_s,
            settle_s=0.2,
            limits=LIMITS,
            period_s=0.02,
            lease_s=lease_s,
            cores=(0, 1),
        )
        return Controller(
            self.state, self.registry, pools=self.pools, settings=settings, holder=holder, events=self.events
        )

    async def ready(self) -> dict[str, int]:
        """Generation of every ready worker, by id."""
        return {r.worker_id: r.generation for r in await self.registry.workers() if r.state == "ready"}

    async def until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        while not await condition():  # noqa: ASYNC110  the state is Redis', and it announces nothing
            await asyncio.sleep(0.01)

    async def until_ready(self, *names: str) -> None:
        """Until exactly these are ready and no other worker exists."""

        async def reached() -> bool:
            return set(await self.ready()) == set(names) == set(self.pools.workers)

        await self.until(reached)


@asynccontextmanager
async def acting(controller: Controller) -> AsyncIterator[Controller]:
    task = asyncio.create_task(controller.run())
    try:
        yield controller
    finally:
        controller.stop()
        await task


@asynccontextmanager
async def new_clients(world: World) -> AsyncIterator[World]:
    """The same world over connections that never saw the server die."""
    state = PoolState(world.server.url, cluster="test")
    registry = Registry(world.server.url, cluster="test", ttl_s=60.0)
    world.pools.registry = registry
    try:
        yield World(world.server, state, registry, world.pools, world.events)
    finally:
        await state.close()
        await registry.close()


def run(test: Callable[[World], Awaitable[None]]) -> None:
    async def bounded() -> None:
        server = EmbeddedRedis()
        await server.start()
        state = PoolState(server.url, cluster="test")
        registry = Registry(server.url, cluster="test", ttl_s=60.0)
        try:
            async with asyncio.timeout(30):
                await test(World(server, state, registry, FakePools(registry)))
        finally:
            await state.close()
            await registry.close()
            server.stop()

    asyncio.run(bounded())


def test_pools_that_nobody_sized_get_the_sizes_of_the_configuration() -> None:
    async def test(world: World) -> None:
        async with acting(world.controller()):
            await world.until_ready("prefill-0", "decode-0")
            desired = await world.state.get()
            assert (desired.prefill, desired.decode) == (DesiredPool(size=1), DesiredPool(size=1))
            assert await world.state.has_controller()

    run(test)


def test_one_pool_grows_and_shrinks_and_the_other_is_not_touched() -> None:
    async def test(world: World) -> None:
        async with acting(world.controller()):
            await world.until_ready("prefill-0", "decode-0")
            await world.state.set_size(D, 3)
            await world.until_ready("prefill-0", "decode-0", "decode-1", "decode-2")
            await world.state.set_size(D, 1)
            await world.until_ready("prefill-0", "decode-0")
            await world.state.set_size(D, 0)
            await world.until_ready("prefill-0")
        assert [line for line in world.pools.log if "prefill" in line] == ["start prefill-0"]
        assert world.pools.log[-2:] == ["drain decode-0", "stop decode-0"]

    run(test)


def test_a_slow_drain_holds_up_nothing_else() -> None:
    async def test(world: World) -> None:
        async with acting(world.controller()):
            await world.until_ready("prefill-0", "decode-0")
            world.pools.may_finish.clear()
            await world.state.ask_drain(WorkerId("decode-0"))

            async def replaced() -> bool:
                return set(await world.ready()) == {"prefill-0", "decode-1"}

            await world.until(replaced)
            await world.state.set_size(P, 2)

            async def grown() -> bool:
                return "prefill-1" in await world.ready()

            await world.until(grown)
            assert "decode-0" in world.pools.workers
            world.pools.may_finish.set()
            await world.until_ready("prefill-0", "prefill-1", "decode-1")

            async def forgotten() -> bool:
                return not (await world.state.get()).drain

            await world.until(forgotten)

    run(test)


def test_a_drain_that_takes_too_long_is_cut_off_and_said_so() -> None:
    async def test(world: World) -> None:
        async with acting(world.controller(drain_timeout_s=0.1)):
            await world.until_ready("prefill-0", "decode-0")
            world.pools.may_finish.clear()
            await world.state.set_size(D, 0)
            await world.until_ready("prefill-0")
        assert world.events.notes == ["worker decode-0 had not finished after 0.1 s: 0 sequences cut off"]

    run(test)


def test_a_restart_replaces_one_after_another_and_never_has_fewer_ready() -> None:
    async def test(world: World) -> None:
        async with acting(world.controller()):
            await world.state.set_size(D, 2)
            await world.until_ready("prefill-0", "decode-0", "decode-1")
            generation = await world.state.restart(D)
            seen = []

            async def restarted() -> bool:
                decode = {name: age for name, age in (await world.ready()).items() if name.startswith("decode")}
                seen.append(len(decode))
                return len(decode) == 2 and set(decode.values()) == {generation}

            await world.until(restarted)
            assert min(seen) >= 2
            assert world.pools.most == 4  # prefill-0, two of decode, and one more of decode
            assert (await world.ready())["prefill-0"] == 0

    run(test)


def test_a_worker_whose_actor_is_dead_is_replaced() -> None:
    async def test(world: World) -> None:
        async with acting(world.controller()):
            await world.until_ready("prefill-0", "decode-0")
            await world.pools.lose(WorkerId("decode-0"))

            async def replaced() -> bool:
                return set(await world.ready()) == {"prefill-0", "decode-1"} and len(world.pools.workers) == 2

            await world.until(replaced)

    run(test)


def test_a_worker_that_stays_away_is_replaced_after_its_time() -> None:
    async def test(world: World) -> None:
        async with acting(world.controller()):
            await world.until_ready("prefill-0", "decode-0")
            world.pools.may_start.clear()
            await world.registry.remove(WorkerId("decode-0"))

            async def stopped() -> bool:
                return "stop decode-0" in world.pools.log

            await world.until(stopped)
            world.pools.may_start.set()
            await world.until_ready("prefill-0", "decode-1")

    run(test)


def test_a_worker_that_comes_back_in_time_is_kept() -> None:
    async def test(world: World) -> None:
        async with acting(world.controller()):
            await world.until_ready("prefill-0", "decode-0")
            await world.registry.remove(WorkerId("decode-0"))
            await world.until_ready("prefill-0", "decode-0")
        assert sorted(world.pools.log) == ["start decode-0", "start prefill-0"]

    run(test)


def test_a_lost_worker_is_told_of_and_shown_before_it_is_back() -> None:
    async def test(world: World) -> None:
        async with acting(world.controller()):
            async def is_shown(state: str) -> bool:
                return ("decode-0", state) in {(w.worker_id, w.state) for w in await world.state.seen()}

            await world.until_ready("prefill-0", "decode-0")
            await world.until(lambda: is_shown("ready"))  # the controller itself has seen it: only then can it be lost
            world.pools.may_start.clear()
            await world.registry.remove(WorkerId("decode-0"))

            async def told() -> bool:
                return any("decode-0" in note for note in world.events.notes)

            await world.until(lambda: is_shown("lost"))
            await world.until(told)
            world.pools.may_start.set()
            await world.until_ready("prefill-0", "decode-0")

    run(test)


def test_failed_starts_are_tried_again_ever_more_slowly_until_one_works() -> None:
    async def test(world: World) -> None:
        world.pools.is_broken = True
        async with acting(world.controller()):

            async def failed_often() -> bool:
                return world.events.failures.count("decode-0") >= 4

            started_s = asyncio.get_running_loop().time()
            await world.until(failed_often)
            assert asyncio.get_running_loop().time() - started_s >= 0.05 + 0.1 + 0.2
            assert len(world.pools.workers) <= 2
            world.pools.is_broken = False
            await world.until_ready("prefill-0", "decode-0")

    run(test)


def test_a_second_controller_waits_until_the_first_has_gone() -> None:
    async def test(world: World) -> None:
        first = world.controller("a")
        running = asyncio.create_task(first.run())
        await world.until_ready("prefill-0", "decode-0")
        async with acting(world.controller("b")):
            await world.state.set_size(D, 2)
            await world.until_ready("prefill-0", "decode-0", "decode-1")
            first.stop()
            await running
            await world.state.set_size(D, 3)
            await world.until_ready("prefill-0", "decode-0", "decode-1", "decode-2")
        assert sorted(world.pools.log) == [f"start {name}" for name in sorted(world.pools.workers)]

    run(test)


def test_a_controller_that_dies_in_the_middle_is_followed_by_one_that_finishes() -> None:
    async def test(world: World) -> None:
        async with acting(world.controller()):
            await world.state.set_size(P, 2)
            await world.until_ready("prefill-0", "prefill-1", "decode-0")
            world.pools.may_start.clear()
            world.pools.may_finish.clear()
            await world.state.set_size(D, 3)
            await world.state.ask_drain(WorkerId("prefill-0"))

            async def under_way() -> bool:
                return {"start decode-2", "drain prefill-0", "start prefill-2"} <= set(world.pools.log)

            await world.until(under_way)
        world.pools.may_start.set()
        world.pools.may_finish.set()
        async with acting(world.controller()):
            await world.until_ready("prefill-1", "prefill-2", "decode-0", "decode-1", "decode-2")
        starts = [line for line in world.pools.log if line.startswith("start")]
        assert len(starts) == len(set(starts)) == 6

    run(test)


def test_a_redis_that_lost_everything_gets_the_sizes_back_and_no_worker_is_touched() -> None:
    async def test(world: World) -> None:
        async with acting(world.controller()):
            await world.state.set_size(D, 2)
            await world.until_ready("prefill-0", "decode-0", "decode-1")
            records: list[WorkerRecord] = await world.registry.workers()
            world.server.stop()
            await asyncio.sleep(0.1)
            await world.server.start()
            async with new_clients(world) as fresh:
                for record in records:  # as living workers do with their next heartbeat
                    await fresh.registry.put(record)

                async def written_back() -> bool:
                    return (await fresh.state.get()).decode == DesiredPool(size=2)

                await fresh.until(written_back)
                await fresh.state.set_size(D, 3)
                await fresh.until_ready("prefill-0", "decode-0", "decode-1", "decode-2")
        assert not [line for line in world.pools.log if not line.startswith("start")]

    run(test)


def test_while_ray_does_not_answer_nothing_is_done_and_afterwards_all_of_it() -> None:
    async def test(world: World) -> None:
        async with acting(world.controller()) as controller:
            await world.until_ready("prefill-0", "decode-0")
            world.pools.is_away = True
            await world.state.set_size(D, 2)

            async def noticed() -> bool:
                return (controller.metrics.registry.get_sample_value(FAILURES) or 0) > 0

            await world.until(noticed)
            assert len(world.pools.workers) == 2
            world.pools.is_away = False
            await world.until_ready("prefill-0", "decode-0", "decode-1")

    run(test)


FAILURES = "tandem_controller_reconcile_failures_total"


def test_ending_drains_all_workers_and_forgets_the_sizes() -> None:
    async def test(world: World) -> None:
        async with acting(world.controller()) as controller:
            await world.state.set_size(D, 2)
            await world.until_ready("prefill-0", "decode-0", "decode-1")
            await controller.end_workers(1.0)
            assert not world.pools.workers
            assert not await world.registry.workers()
        assert (await world.state.get()).decode is None
        drains = {line for line in world.pools.log if line.startswith("drain")}
        assert drains == {"drain prefill-0", "drain decode-0", "drain decode-1"}

    run(test)
