"""NIXL and Mooncake's transfer engine for `benchmarks.transfer`; runs in the environment of `make bench-peers`.

    python peer_engines.py NUM_BYTES      # then commands on standard input, one JSON answer each on standard output

Imports nothing of Tandem: the engines bring libraries of their own. Each gets the treatment that suits it best: memory
registered and transfers prepared beforehand, one descriptor for each layer, all layers posted at once.
"""

from __future__ import annotations

import json
import mmap
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np

NUM_LAYERS = 30
TIMEOUT_S = 60.0


class Engine(Protocol):
    """One engine on one side."""

    def address(self) -> Any:
        """What the source needs of the destination; picklable."""

    def connect(self, address: Any) -> None:
        """On the source."""

    def prepare(self, layer_bytes: int) -> Callable[[], None]:
        """On the source: what writes all layers into the destination's memory, at the same offsets, and waits."""


class Nixl:
    """One agent with the UCX backend."""

    def __init__(self, memory: np.ndarray, name: str) -> None:
        from nixl_cu12._api import nixl_agent, nixl_agent_config

        self._agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
        self._start = int(memory.ctypes.data)
        self._registered = self._agent.register_memory([(self._start, memory.nbytes, 0, "")], "DRAM")
        self._peer = ("", 0)

    def address(self) -> Any:
        return self._agent.get_agent_metadata(), self._start

    def connect(self, address: Any) -> None:
        metadata, start = address
        self._peer = (self._agent.add_remote_agent(metadata), start)

    def prepare(self, layer_bytes: int) -> Callable[[], None]:
        name, remote = self._peer
        handles = [
            self._agent.initialize_xfer(
                "WRITE",
                self._agent.get_xfer_descs([(self._start + layer * layer_bytes, layer_bytes, 0)], "DRAM"),
                self._agent.get_xfer_descs([(remote + layer * layer_bytes, layer_bytes, 0)], "DRAM"),
                name,
            )
            for layer in range(NUM_LAYERS)
        ]

        def write() -> None:
            waiting = [handle for handle in handles if self._agent.transfer(handle) != "DONE"]
            deadline = time.monotonic() + TIMEOUT_S
            while waiting:
                states = [self._agent.check_xfer_state(handle) for handle in waiting]
                if "ERR" in states or time.monotonic() > deadline:
                    raise RuntimeError("NIXL: a transfer failed")
                waiting = [handle for handle, state in zip(waiting, states, strict=True) if state != "DONE"]

        return write


class Mooncake:
    """One engine over TCP, which is what it has for host memory without RDMA."""

    def __init__(self, memory: np.ndarray, name: str) -> None:
        from mooncake.engine import TransferEngine

        self._engine = TransferEngine()
        if self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
            raise RuntimeError("Mooncake does not start")
        self._start = int(memory.ctypes.data)
        if self._engine.register_memory(self._start, memory.nbytes) != 0:
            raise RuntimeError("Mooncake does not register memory")
        self._peer = ("", 0)

    def address(self) -> Any:
        return f"127.0.0.1:{self._engine.get_rpc_port()}", self._start

    def connect(self, address: Any) -> None:
        self._peer = address

    def prepare(self, layer_bytes: int) -> Callable[[], None]:
        name, remote = self._peer
        offsets = [layer * layer_bytes for layer in range(NUM_LAYERS)]
        sources = [self._start + offset for offset in offsets]
        targets = [remote + offset for offset in offsets]

        def write() -> None:
            if self._engine.batch_transfer_sync_write(name, sources, targets, [layer_bytes] * NUM_LAYERS) != 0:
                raise RuntimeError("Mooncake: a transfer failed")

        return write


ENGINES: dict[str, Callable[[np.ndarray, str], Engine]] = {"nixl": Nixl, "mooncake": Mooncake}


def _allocate(num_bytes: int) -> np.ndarray:
    """As Tandem's UCX transport does: private memory in huge pages where the kernel has them."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)


def _pin(index: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[index % len(cores)]})


def _destination(channel: Connection, name: str, num_bytes: int) -> None:
    _pin(1)
    memory = _allocate(num_bytes)
    memory.fill(1)
    engine = ENGINES[name](memory, f"{name}-destination")
    channel.send(engine.address())
    while (count := channel.recv()) is not None:
        channel.send(int(memory[:count].sum(dtype=np.uint64)))
    os._exit(0)  # the engines' own threads do not all end


class Peer:
    """One engine between this process and another."""

    def __init__(self, name: str, num_bytes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._channel, remote = context.Pipe()
        self._process = context.Process(target=_destination, args=(remote, name, num_bytes))
        self._process.start()
        remote.close()
        self._memory = _allocate(num_bytes)
        self._memory[:] = np.random.default_rng(1).integers(0, 255, num_bytes, dtype=np.uint8)
        self._engine = ENGINES[name](self._memory, f"{name}-source")
        self._engine.connect(self._channel.recv())
        self._prepared: dict[int, Callable[[], None]] = {}

    def seconds(self, layer_bytes: int) -> float:
        """One transfer of all layers, prepared before."""
        if layer_bytes not in self._prepared:
            self._prepared[layer_bytes] = self._engine.prepare(layer_bytes)
        write = self._prepared[layer_bytes]
        started = time.perf_counter()
        write()
        return time.perf_counter() - started

    def arrived(self, layer_bytes: int) -> bool:
        """Whether the destination has the source's bytes."""
        count = NUM_LAYERS * layer_bytes
        self._channel.send(count)
        return bool(self._channel.recv() == int(self._memory[:count].sum(dtype=np.uint64)))

    def close(self) -> None:
        self._channel.send(None)
        self._process.join()


def main() -> None:
    """Commands: `open NAME`, `run NAME LAYER_BYTES`, `check NAME LAYER_BYTES`, `close`."""
    num_bytes, peers = int(sys.argv[1]), {}
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the engines write to standard output
    _pin(0)
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "close":
            break
        try:
            answer: Any = True
            if command == "open":
                peers[arguments[0]] = Peer(arguments[0], num_bytes)
            elif command == "run":
                answer = peers[arguments[0]].seconds(int(arguments[1]))
            else:
                answer = peers[arguments[0]].arrived(int(arguments[1]))
            print(json.dumps({"ok": answer}), file=answers)
        except (ImportError, RuntimeError, OSError, EOFError) as exc:
            print(json.dumps({"error": f"{type(exc).__name__}: {exc}"}), file=answers)
    for peer in peers.values():
        peer.close()
    answers.close()
    os._exit(0)


if __name__ == "__main__":
    main()
