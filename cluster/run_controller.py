"""The controller's process: `python -m cluster.run_controller --settings-json JSON [--ready-fd N]`.

SIGTERM and SIGINT end it and leave the workers to a successor. SIGUSR1 drains and ends all workers first, SIGUSR2
ends them without waiting for what they run. Writes a JSON line to the fd for each event.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from cluster.controller import Controller
from cluster.controller_settings import ControllerEvents, ControllerSettings
from cluster.events import WorkerInfo
from cluster.placement import RESOURCE, Selector, WorkerPlacement, gpus_of_ranks, with_device
from cluster.pools import RayPools
from cluster.process_settings import ProcessSettings
from cluster.processes import usable_cores
from cluster.ray_client import RayClient
from cluster.sizes_file import SizesFile, read_sizes
from cluster.stores import NodeStores
from tandem.config import split_labels, to_mapping
from tandem.errors import TandemError
from tandem.observability.logging import setup_logging
from tandem.observability.server import serve_metrics
from tandem.pool_state import PoolState
from tandem.registry import Registry
from tandem.tasks import cancel_all
from tandem.types import Role, WorkerId

SETTLE_HEARTBEATS = 2.5
"""Heartbeats after which every living worker has shown itself."""
_LAST_TURN_S = 5.0
"""Longest wait for what the controller was doing when it was asked to end: it may hang in a Ray that has gone."""


class LineEvents(ControllerEvents):
    """Writes each event as a line of JSON; without an fd, nothing."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        self._has_reached = False

    def _write(self, values: dict[str, Any]) -> None:
        if self._fd is None:
            return
        try:
            os.write(self._fd, json.dumps(values).encode() + b"\n")
        except BrokenPipeError:
            self._fd = None  # nobody listens any more

    def ready(self, info: WorkerInfo) -> None:
        """See `ControllerEvents`."""
        self._write({"ready": asdict(info)})

    def failed(self, worker_id: WorkerId, error: TandemError) -> None:
        """See `ControllerEvents`."""
        self._write({"failed": worker_id, "code": error.code, "message": error.message})

    def gone(self, worker_id: WorkerId) -> None:
        """See `ControllerEvents`."""
        self._write({"gone": worker_id})

    def reached(self) -> None:
        """See `ControllerEvents`; only the first time is told."""
        if not self._has_reached:
            self._has_reached = True
            self._write({"reached": True})

    def note(self, text: str) -> None:
        """See `ControllerEvents`."""
        self._write({"note": text})


def worker_settings(settings: ProcessSettings, place: WorkerPlacement) -> dict[str, Any]:
    """The constructor argument of a worker's actor; see `cluster/ray_worker.py`."""
    return {
        "config": to_mapping(settings.config),
        "worker_id": str(place.worker_id),
        "redis_url": settings.redis_url,
        "host": settings.worker_host,
        "cores": list(place.cores),
        "cores_host": socket.gethostname(),
        "generation": place.generation,
        "num_ranks": place.num_ranks,
        "rank_resource": RESOURCE[place.role],
    }


def first_sizes(settings: ProcessSettings) -> Mapping[Role, int]:
    """Sizes for pools that nobody has sized yet. Raises ConfigError for a sizes file that cannot be used."""
    if settings.sizes_file:
        return read_sizes(Path(settings.sizes_file)).sizes
    return {Role.PREFILL: settings.config.prefill.num_workers, Role.DECODE: settings.config.decode.num_workers}


def controller_settings(settings: ProcessSettings) -> ControllerSettings:
    """From the cluster's configuration and this host's cores. Raises ConfigError."""
    config = settings.config
    return ControllerSettings(
        sizes=first_sizes(settings),
        drain_timeout_s=config.drain_timeout_s,
        settle_s=SETTLE_HEARTBEATS * config.registry.heartbeat_s,
        cores=usable_cores() if config.pin_cores else (),
        num_ranks={Role.PREFILL: config.prefill.num_ranks, Role.DECODE: config.decode.num_ranks},
        selectors={
            Role.PREFILL: Selector(labels=split_labels(config.prefill.nodes)),
            Role.DECODE: Selector(labels=split_labels(config.decode.nodes)),
        },
    )


async def _num_gpus(ray: RayClient) -> float:
    def count() -> float:
        import ray

        return float(ray.cluster_resources().get("GPU", 0.0))

    return await ray.call(count)


async def run(settings: ProcessSettings, events: ControllerEvents) -> None:
    """A controller until a signal ends it. Raises TandemError when it cannot start."""
    config = settings.config
    own_settings = controller_settings(settings)
    asked = _signals()
    state = PoolState(settings.redis_url, cluster=config.cluster)
    registry = Registry(settings.redis_url, cluster=config.cluster, ttl_s=config.registry.ttl_s)
    ray = RayClient(settings.ray_address, namespace=config.cluster)
    await ray.connect()
    config = with_device(config, num_gpus=await _num_gpus(ray))
    settings = replace(settings, config=config)
    pools = RayPools(
        ray,
        cluster=config.cluster,
        settings_of=lambda place: worker_settings(settings, place),
        classes=settings.classes,
        gpus=gpus_of_ranks(config),
        selectors=own_settings.selectors,
    )
    controller = Controller(
        state,
        registry,
        pools=pools,
        settings=own_settings,
        holder=settings.holder,
        events=events,
    )
    metrics = await serve_metrics(
        controller.metrics.registry, settings.metrics_host, port=config.controller_metrics_port
    )
    events.note(f"controller: metrics at {metrics.url}")
    running = asyncio.create_task(controller.run(), name="controller")
    try:
        async with _following(settings, controller, state, events), _keeping_stores(settings, controller, ray, events):
            await _until_asked(controller, running, asked, drain_timeout_s=config.drain_timeout_s)
    finally:
        controller.stop()
        await asyncio.wait({running}, timeout=_LAST_TURN_S)
        await cancel_all([running])
        await metrics.stop()
        if not await ray.close():
            atexit.register(_leave_ray)
        await state.close()
        await registry.close()


def _leave_ray() -> None:
    """In place of Ray's own end, which without a head takes minutes or crashes."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


@contextlib.asynccontextmanager
async def _keeping_stores(
    settings: ProcessSettings, controller: Controller, ray: RayClient, events: ControllerEvents
) -> AsyncIterator[None]:
    """Each node's prefix store, if there are to be any. They end with the cluster, not with this controller."""
    if not settings.config.prefix_store.host_bytes:
        yield
        return
    values = {
        "config": to_mapping(settings.config),
        "redis_url": settings.redis_url,
        "host": settings.worker_host,
    }
    stores = NodeStores(ray, settings=values, note=events.note)
    task = asyncio.create_task(stores.keep(lambda: controller.is_acting), name="prefix stores")
    try:
        yield
    finally:
        await cancel_all([task])
        if controller.has_ended_workers:
            await stores.end()


@contextlib.asynccontextmanager
async def _following(
    settings: ProcessSettings, controller: Controller, state: PoolState, events: ControllerEvents
) -> AsyncIterator[None]:
    """The sizes file, if there is one, is followed meanwhile."""
    if not settings.sizes_file:
        yield
        return
    file = SizesFile(Path(settings.sizes_file), state, is_acting=lambda: controller.is_acting, note=events.note)
    task = asyncio.create_task(file.follow(), name="sizes file")
    try:
        yield
    finally:
        await cancel_all([task])


def _signals() -> asyncio.Queue[signal.Signals]:
    asked: asyncio.Queue[signal.Signals] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        asyncio.get_running_loop().add_signal_handler(number, asked.put_nowait, number)
    return asked


async def _until_asked(
    controller: Controller,
    running: asyncio.Task[None],
    asked: asyncio.Queue[signal.Signals],
    *,
    drain_timeout_s: float,
) -> None:
    asking = asyncio.create_task(asked.get())
    await asyncio.wait({asking, running}, return_when=asyncio.FIRST_COMPLETED)
    if not asking.done():
        asking.cancel()
        await running  # it failed: raises why
        return
    number = asking.result()
    if number in (signal.SIGUSR1, signal.SIGUSR2):
        ending = controller.end_workers(drain_timeout_s if number is signal.SIGUSR1 else 0.0)
        await _unless_asked_again(ending, asked)


async def _unless_asked_again(ending: Coroutine[Any, Any, None], asked: asyncio.Queue[signal.Signals]) -> None:
    tasks = {asyncio.create_task(ending), asyncio.create_task(asked.get())}
    over, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    await cancel_all(pending)
    for task in over:
        task.result()


def main() -> int:
    """Exit status 0 when it was asked to end, 1 when it could not start."""
    parser = argparse.ArgumentParser(prog="python -m cluster.run_controller", description=__doc__)
    parser.add_argument("--settings-json", required=True, help="see ProcessSettings")
    parser.add_argument("--ready-fd", type=int, default=None, help="file descriptor for the event lines")
    arguments = parser.parse_args()
    setup_logging()
    try:
        asyncio.run(run(ProcessSettings.from_json(arguments.settings_json), LineEvents(arguments.ready_fd)))
    except TandemError as exc:
        print(f"tandem controller: {exc.message}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
