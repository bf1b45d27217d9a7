"""The router's process below a launcher: `python -m router --config-json JSON --redis-url URL [--ready-fd N]`.

Writes one JSON line to the fd when both servers are bound and a second one when requests will be served; with `--stay`
a third one when it has drained, and then answers operators until one more signal.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from dataclasses import asdict
from typing import Any

from router.dispatch import ServedModel
from router.process import BoundRouter, RouterEvents, run_router
from tandem.config import from_mapping
from tandem.errors import TandemError
from tandem.observability.logging import setup_logging


class LineEvents(RouterEvents):
    """Writes lines of JSON to the fd; without one, nothing."""

    def __init__(self, fd: int | None, *, stays: bool) -> None:
        self._fd = fd
        self._stays = stays

    def bound(self, router: BoundRouter) -> None:
        """See `RouterEvents`."""
        self._write({"grpc": router.grpc, "http": router.http, "startup": router.startup})

    def serving(self, model: ServedModel | None) -> None:
        """See `RouterEvents`."""
        self._write({"ready": True, "model": None if model is None else asdict(model)})

    def drained(self) -> bool:
        """See `RouterEvents`. A launcher that is gone sends no signal any more."""
        try:
            self._write({"drained": True})
        except BrokenPipeError:
            return False
        return self._stays

    def _write(self, values: dict[str, Any]) -> None:
        if self._fd is not None:
            os.write(self._fd, json.dumps(values).encode() + b"\n")


def main() -> int:
    """Exit status 0 after a drain, 1 when the router could not be started."""
    parser = argparse.ArgumentParser(prog="python -m router", description=__doc__)
    parser.add_argument("--config-json", required=True, help="the cluster's configuration, as JSON")
    parser.add_argument("--redis-url", required=True, help="redis://host:port/db of the registry")
    parser.add_argument("--ready-fd", type=int, default=None, help="file descriptor for the two ready lines")
    parser.add_argument("--stay", action="store_true", help="after its drain answer operators until one more signal")
    arguments = parser.parse_args()
    setup_logging()
    try:
        config = from_mapping(json.loads(arguments.config_json))
        events = LineEvents(arguments.ready_fd, stays=arguments.stay)
        asyncio.run(run_router(config, redis_url=arguments.redis_url, events=events))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except TandemError as exc:
        print(f"tandem router: {exc.message}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
