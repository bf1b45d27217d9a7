"""The router's process: `python -m router --config-json JSON --redis-url URL [--ready-fd N]`.

Writes one JSON line to the fd when both servers are bound and a second one when requests will be served. SIGTERM and
SIGINT drain; a second one ends at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from typing import Any

import psutil

from router.admin import PoolAdmin
from router.app import RunningRouter, serve
from router.dispatcher import WorkerDispatcher
from tandem.config import ClusterConfig, from_mapping
from tandem.errors import TandemError
from tandem.key_source import load_key
from tandem.model.files import resolve_model
from tandem.observability.logging import setup_logging
from tandem.observability.metrics import RouterMetrics
from tandem.pool_state import PoolState
from tandem.registry import Registry


def _announce(ready_fd: int | None, values: dict[str, Any]) -> None:
    if ready_fd is not None:
        os.write(ready_fd, json.dumps(values).encode() + b"\n")


def _stop_on_signals() -> asyncio.Event:
    """Set by the first SIGTERM or SIGINT; the second one ends the process. Before this is called the first one does."""
    stopping = asyncio.Event()

    def on_signal(number: int) -> None:
        if stopping.is_set():
            os._exit(128 + number)
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    return stopping


async def _run(config: ClusterConfig, *, redis_url: str, ready_fd: int | None) -> None:
    started_s = time.monotonic()
    key = load_key(config)
    startup = {"imports": time.time() - psutil.Process().create_time()}
    serving = asyncio.Event()
    registry = Registry(redis_url, cluster=config.cluster, ttl_s=config.registry.ttl_s)
    state = PoolState(redis_url, cluster=config.cluster)
    metrics = RouterMetrics()
    dispatcher = WorkerDispatcher(
        registry, key=key, on_change=lambda: _note(dispatcher, serving), metrics=metrics
    )
    await dispatcher.start()
    try:
        files = await asyncio.to_thread(resolve_model, config.model.source)
        admin = PoolAdmin(state, dispatcher)
        router = await serve(
            config=config,
            dispatcher=dispatcher,
            tokenizer_dir=files.tokenizer_dir,
            admin=admin,
            metrics=metrics,
        )
        startup["tokenizer and servers"] = time.monotonic() - started_s
        stopping = _stop_on_signals()
        try:
            addresses = {"grpc": router.grpc_address, "http": f"http://{router.http_address}"}
            _announce(ready_fd, {**addresses, "startup": startup})
            await _serve_until(router, serving=serving, stopping=stopping, ready_fd=ready_fd)
        finally:
            await router.stop(config.drain_timeout_s)
    finally:
        await dispatcher.close()
        await registry.close()
        await state.close()


def _note(dispatcher: WorkerDispatcher, serving: asyncio.Event) -> None:
    if dispatcher.ready():
        serving.set()


async def _serve_until(
    router: RunningRouter, *, serving: asyncio.Event, stopping: asyncio.Event, ready_fd: int | None
) -> None:
    waits = {asyncio.create_task(serving.wait()), asyncio.create_task(stopping.wait())}
    _, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    if serving.is_set():
        _announce(ready_fd, {"ready": True})
    await stopping.wait()
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)


def main() -> int:
    """Exit status 0 after a drain, 1 when the router could not be started."""
    parser = argparse.ArgumentParser(prog="python -m router", description=__doc__)
    parser.add_argument("--config-json", required=True, help="the cluster's configuration, as JSON")
    parser.add_argument("--redis-url", required=True, help="redis://host:port/db of the registry")
    parser.add_argument("--ready-fd", type=int, default=None, help="file descriptor for the two ready lines")
    arguments = parser.parse_args()
    setup_logging()
    try:
        config = from_mapping(json.loads(arguments.config_json))
        asyncio.run(_run(config, redis_url=arguments.redis_url, ready_fd=arguments.ready_fd))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except TandemError as exc:
        print(f"tandem router: {exc.message}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
