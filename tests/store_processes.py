"""Prefix stores and their workers as processes that can be stopped and killed, forked quickly."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch

from cluster.store_host import StoreHost
from cluster.store_settings import StoreHostSettings
from tests.factories import CLUSTER_KEY
from tests.store_nodes import at, chain, client_of, fill, put

TIMEOUT_S = 20.0
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.store_processes", "kv_transfer.loopback", "kv_transfer.ucx"])


class Forked:
    """A process that answers over a pipe; killed at the end of the block."""

    def __init__(self, role: str, *arguments: str) -> None:
        self._channel, remote = _FORKS.Pipe()
        self._process = _FORKS.Process(target=_run, args=(remote, role, *arguments))
        self._process.start()
        remote.close()

    def read(self) -> Any:
        """The next thing that it said."""
        assert self._channel.poll(TIMEOUT_S), "it says nothing"
        return self._channel.recv()

    def ask(self, *words: Any) -> Any:
        """Its answer to a command."""
        self._channel.send(words)
        return self.read()

    def signal(self, number: int) -> None:
        """Sends a signal, and waits for the end where it is one that ends."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def wait_stopped(self) -> None:
        """Until it stands still."""
        process = psutil.Process(self._process.pid)
        while process.status() != psutil.STATUS_STOPPED:
            pass

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join(TIMEOUT_S)
        self._process.close()
        self._channel.close()


def stop_forks() -> None:
    """Ends the process that others are forked from; the next one starts another."""
    forkserver._forkserver._stop()


def _run(channel: Connection, role: str, *arguments: str) -> None:
    torch.set_num_threads(1)
    with suppress(EOFError):
        asyncio.run((_store if role == "store" else _worker)(channel, *arguments))


async def _store(channel: Connection, settings: str, num_blocks: str) -> None:
    """A store that has `num_blocks` blocks of `chain`."""
    host = StoreHost(StoreHostSettings.from_json(settings), CLUSTER_KEY)
    await host.start()
    try:
        size = host.settings.store.block_bytes
        async with client_of(host, block_bytes=size) as client:
            await put(client, chain(int(num_blocks)))
            channel.send(host.record.address)
            await asyncio.to_thread(channel.recv)
    finally:
        await host.stop()


async def _worker(channel: Connection, address: str) -> None:
    """Holds a loan and a grant and says how they are."""
    async with client_of(at(address), "forked") as client:
        channel.send(client.is_attached)
        loan, grant, names = None, None, chain(2, seed=9)
        while True:
            words: Sequence[Any] = await asyncio.to_thread(channel.recv)
            if words[0] == "hold":
                loan = await client.acquire(chain(words[1]))
                grant = await client.put(names)
                channel.send((len(loan.slots), len(grant.slots)))
            elif words[0] == "intact":
                assert loan is not None
                channel.send(loan.intact())
            elif words[0] == "commit":
                assert grant is not None
                channel.send(await grant.commit(fill(grant, names)))
            elif words[0] == "lookup":
                await client.wait_attached(TIMEOUT_S)
                channel.send((await client.lookup(chain(words[1]))).num_host)
