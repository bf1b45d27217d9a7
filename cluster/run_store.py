"""A store's process: `python -m cluster.run_store --settings-json JSON [--ready-fd N]`; SIGTERM and SIGINT end it.

Writes one JSON line to the fd when it serves. The cluster's key comes from the environment or its file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from dataclasses import asdict

from redis.exceptions import RedisError

from cluster.store_host import StoreHost
from cluster.store_settings import StoreHostSettings
from tandem.errors import TandemError
from tandem.key_source import load_key
from tandem.observability.logging import setup_logging


async def run(settings: StoreHostSettings, ready_fd: int | None) -> None:
    """A store until a signal ends it. Raises TandemError or RedisError when it cannot start."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    host = StoreHost(settings, load_key(settings.config))
    record = await host.start()
    try:
        if ready_fd is not None:
            os.write(ready_fd, json.dumps({"ready": asdict(record)}).encode() + b"\n")
        await stop.wait()
    finally:
        await host.stop()


def main() -> int:
    """Exit status 0 after a signal, 1 when the store could not be started."""
    parser = argparse.ArgumentParser(prog="python -m cluster.run_store", description=__doc__)
    parser.add_argument("--settings-json", required=True, help="what the store is to be, as JSON")
    parser.add_argument("--ready-fd", type=int, default=None, help="file descriptor for the ready line")
    arguments = parser.parse_args()
    setup_logging()
    try:
        asyncio.run(run(StoreHostSettings.from_json(arguments.settings_json), arguments.ready_fd))
    except (TandemError, RedisError) as exc:
        print(f"tandem store: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
