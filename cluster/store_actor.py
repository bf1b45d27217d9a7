"""A node's prefix store as a Ray actor: one process on each node, put there by the controller, restarted by Ray.

The store itself is `store_host.py`'s; here is the thread with its event loop, and what it must know of the node.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import threading
from dataclasses import asdict
from typing import Any

from redis.exceptions import RedisError

from cluster.store_host import StoreHost
from cluster.store_settings import StoreHostSettings, block_bytes, slots_in
from tandem.config import ClusterConfig, from_mapping
from tandem.errors import TandemError
from tandem.key_source import load_key
from tandem.model.devices import on_gpu
from tandem.model.files import resolve_model
from tandem.model.loader import load_spec
from tandem.model.spec import fingerprint
from tandem.prefix_store.settings import StoreSettings

logger = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.5
_LONGEST_BACKOFF_S = 30.0


def store_settings(config: ClusterConfig, *, redis_url: str, node: str, host: str) -> StoreHostSettings:
    """What the store of `node` is to be. Reads the model's headers. Raises ConfigError and ModelLoadError."""
    wanted = config.prefix_store
    spec = load_spec(resolve_model(config.model.source))
    dtype = config.model.kv_dtype(on_gpu=on_gpu(config.model))
    layout = spec.kv_layout(block_size=config.model.block_size, dtype=dtype)
    size = block_bytes(layout)
    return StoreHostSettings(
        config=config,
        redis_url=redis_url,
        node=node,
        host=host,
        store=StoreSettings(
            fingerprint=fingerprint(spec, layout),
            block_bytes=size,
            num_slots=slots_in(wanted.host_bytes, size),
            write_policy=wanted.disk_write,
        ),
        disk_directory=wanted.disk_path,
        disk_bytes=wanted.disk_bytes,
        tenant_share=wanted.tenant_share,
    )


class StoreActor:
    """`settings`: config, redis_url, store_node, host. The constructor only starts the thread; `ready` waits."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._loop = asyncio.new_event_loop()
        self._host: StoreHost | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, name="store-loop", daemon=True)
        self._thread.start()
        self._started: concurrent.futures.Future[dict[str, Any]] = asyncio.run_coroutine_threadsafe(
            self._start(), self._loop
        )

    async def _start(self) -> dict[str, Any]:
        config = from_mapping(self._settings["config"])
        settings = await asyncio.to_thread(
            store_settings,
            config,
            redis_url=self._settings["redis_url"],
            node=self._settings["store_node"],
            host=self._settings["host"],
        )
        return await self._served(settings)

    async def _served(self, settings: StoreHostSettings) -> dict[str, Any]:
        """Tries for as long as it takes: Redis may be away, or the directory still another store's."""
        backoff_s = _FIRST_BACKOFF_S
        while True:
            host = StoreHost(settings, load_key(settings.config))
            try:
                record = await host.start()
            except (TandemError, RedisError) as exc:
                logger.error("the node's prefix store cannot start, trying again in %g s: %s", backoff_s, exc)
            else:
                self._host = host
                return asdict(record)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)

    def ready(self) -> dict[str, Any]:
        """Blocks until it serves: its record. Raises ConfigError or ModelLoadError: then it never will."""
        return self._started.result()

    def drain(self, timeout_s: float) -> bool:
        """Nothing to wait for: workers go on without it."""
        return True

    def stop(self) -> None:
        """Deregisters, waits for writes to disk, frees everything."""
        self._started.cancel()
        if self._host is not None:
            asyncio.run_coroutine_threadsafe(self._host.stop(), self._loop).result()

    def ping(self) -> int:
        """The process id."""
        return os.getpid()
