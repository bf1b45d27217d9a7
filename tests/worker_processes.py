"""Real worker processes without Ray: forked from a server that has imported everything, killed and started at will."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

from tandem.key_source import KEY_VARIABLE
from tests.factories import CLUSTER_KEY

START_TIMEOUT_S = 60.0
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["decode_pool.actor", "prefill_pool.actor", "kv_transfer.ucx", "kv_transfer.loopback"])


class WorkerProcess:
    """One worker at a time, of `role` "prefill" or "decode"."""

    def __init__(self, role: str, settings: dict[str, Any]) -> None:
        self._role = role
        self._settings = settings

    def start(self) -> None:
        """Returns at once; `ready` waits."""
        self._channel, remote = _FORKS.Pipe()
        self._process = _FORKS.Process(target=_run, args=(remote, self._role, self._settings))
        self._process.start()
        remote.close()

    def ready(self) -> None:
        """Until it is registered."""
        assert self._channel.poll(START_TIMEOUT_S), "the worker does not start"
        assert self._channel.recv() == "ready"

    def kill(self) -> None:
        """SIGKILL, at whatever it is doing."""
        self._process.kill()
        self._process.join()
        self._channel.close()

    def stop(self) -> None:
        """In good order."""
        self._channel.send("stop")
        self._process.join(START_TIMEOUT_S)
        self.kill()


def stop_forks() -> None:
    """Ends the process that workers are forked from."""
    forkserver._forkserver._stop()


def _run(channel: Connection, role: str, settings: dict[str, Any]) -> None:
    from decode_pool.actor import DecodeActor
    from prefill_pool.actor import PrefillActor

    os.environ[KEY_VARIABLE] = CLUSTER_KEY.to_hex()
    actor = (PrefillActor if role == "prefill" else DecodeActor)(settings)
    actor.ready()
    channel.send("ready")
    channel.recv()
    actor.stop()
