"""KV transfer GB/s of each transport beside memcpy, bare UCXX, NIXL and Mooncake, between two processes, in one run.

    make bench-peers && python -m benchmarks.transfer [--quick] [--json FILE]

One message is one layer of a request of the default model: blocks of 16 tokens, 24,576 bytes each, 30 layers. The
subjects take turns, so that noise on the machine meets all of them; a ratio is the median of the rounds' own. Digest
"on" is what the engine pays: hashed by the sender before and by the receiver after. `exposed_over_prefill_1024` is from
a real prefill and a real decode worker (`benchmarks/exposed.py`).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import select
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.exposed import run as run_exposed
from benchmarks.peers import PeerEngines
from benchmarks.report import finish
from kv_transfer.digest import digest
from kv_transfer.transport import Link, MessageHeader, Transport
from kv_transfer.transports import make_transport
from tandem.config import TransportName
from tandem.errors import TransportError
from tandem.types import Epoch, HandoffId, WorkerId

NUM_LAYERS = 30
BLOCK_LAYER_BYTES = 24_576
MIB = 1 << 20
TIMEOUT_S = 60.0
TRANSPORTS: tuple[TransportName, ...] = ("shm", "ucx", "collective")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Region:
    """One transport's half of the benchmark in this process."""

    transport: Transport
    memory: torch.Tensor


class _Sink:
    """Places layer after layer; counts what did not arrive whole."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.num_errors = 0

    def place(self, header: MessageHeader) -> Sequence[torch.Tensor]:
        start = header.layer * header.num_bytes
        return [self.memory[start : start + header.num_bytes]]

    def landed(self, header: MessageHeader, error: TransportError | None) -> None:
        self.num_errors += error is not None


def _pin(index: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[index % len(cores)]})
    torch.set_num_threads(1)


def _layer_bytes(total_bytes: int) -> int:
    """Bytes of one layer: whole blocks, about `total_bytes` in all layers."""
    return max(1, total_bytes // (NUM_LAYERS * BLOCK_LAYER_BYTES)) * BLOCK_LAYER_BYTES


def _layers(memory: torch.Tensor, layer_bytes: int) -> list[torch.Tensor]:
    """The first 30 pieces of `memory`, `layer_bytes` each."""
    return [memory[layer * layer_bytes : (layer + 1) * layer_bytes] for layer in range(NUM_LAYERS)]


def _serve(channel: Connection, num_bytes: int) -> None:
    """The receiving process: serves every transport, then plays the receiver of bare UCXX on request."""
    _pin(1)
    transports = [make_transport(name, worker_id=WorkerId("bench-destination")) for name in TRANSPORTS]
    sinks = [_Sink(transport.allocate(num_bytes).fill_(1)) for transport in transports]
    for transport, sink in zip(transports, sinks, strict=True):
        transport.serve(sink)
    bare = _BareUcx()
    channel.send(([transport.address() for transport in transports], bare.worker.address()))
    memory = sinks[TRANSPORTS.index("ucx")].memory
    while (layer_bytes := channel.recv()) is not None:
        bare.receive(memory, layer_bytes)
    for transport in transports:
        transport.close()
    bare.close()
    channel.send(sum(sink.num_errors for sink in sinks))


class _BareUcx:
    """UCXX with nothing around it: a worker, a probe for each message, and sleep on the worker's descriptor."""

    def __init__(self) -> None:
        from kv_transfer.ucx_native import Worker

        self.worker = Worker(None)
        self._poll = select.poll()
        self._poll.register(self.worker.fd, select.POLLIN)
        self._endpoint: Any = None

    def connect(self, address: bytes) -> None:
        self._endpoint = self.worker.connect(address, error_handling=False)

    def send(self, memory: torch.Tensor, layer_bytes: int) -> None:
        """All layers at once; returns when the last is done."""
        layers = [view.numpy() for view in _layers(memory, layer_bytes)]
        requests = [self._endpoint.send(view, layer) for layer, view in enumerate(layers)]
        self._drive(lambda: all(request.completed for request in requests))

    def receive(self, memory: torch.Tensor, layer_bytes: int) -> None:
        layers = [view.numpy() for view in _layers(memory, layer_bytes)]
        requests: list[Any] = []

        def done() -> bool:
            while (probed := self.worker.probe(0, 0)) is not None:
                requests.append(self.worker.receive(layers[probed.sender_tag.value], probed))
            return len(requests) == NUM_LAYERS and all(request.completed for request in requests)

        self._drive(done)

    def close(self) -> None:
        if self._endpoint is not None:
            self._endpoint.close()
        self.worker.close()

    def _drive(self, done: Callable[[], bool]) -> None:
        while not done():
            if not self.worker.progress() and self.worker.arm():
                self._poll.poll(TIMEOUT_S * 1000)


def _send_layers(link: Link, memory: torch.Tensor, layer_bytes: int, *, with_digest: bool) -> None:
    """As a prefill worker does: layer by layer, digest first, then wait for all."""
    sends = []
    for layer, view in enumerate(_layers(memory, layer_bytes)):
        header = MessageHeader(
            handoff_id=HandoffId("0" * 32),
            epoch=Epoch(1),
            layer=layer,
            first_block=0,
            num_blocks=layer_bytes // BLOCK_LAYER_BYTES,
            num_bytes=layer_bytes,
            digest=digest([view]) if with_digest else 0,
        )
        sends.append(link.send(header, [view]))
    for send in sends:
        send.result(TIMEOUT_S)


def _timed(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _measure(
    channel: Connection,
    regions: dict[str, _Region],
    links: dict[str, Link],
    bare: _BareUcx,
    *,
    peers: PeerEngines,
    layer_bytes: int,
    num_rounds: int,
) -> dict[str, list[float]]:
    """Seconds of each subject for 30 layers, round by round, taking turns; a first round warms up, uncounted."""
    total = NUM_LAYERS * layer_bytes
    source = regions["ucx"].memory
    target = torch.ones(total, dtype=torch.uint8)

    def bare_ucxx() -> None:
        channel.send(layer_bytes)
        bare.send(source, layer_bytes)

    subjects: dict[str, Callable[[], object]] = {
        "memcpy": lambda: target.copy_(source[:total]),
        "bare_ucxx": bare_ucxx,
    }
    for name, region in regions.items():
        send = partial(_send_layers, links[name], region.memory, layer_bytes)
        subjects[name] = partial(send, with_digest=False)
        subjects[f"{name}_digest"] = partial(send, with_digest=True)
    measured: dict[str, Callable[[], float]] = {name: partial(_timed, run) for name, run in subjects.items()}
    measured |= {name: partial(peers.run, name, layer_bytes) for name in peers.names}
    times: dict[str, list[float]] = {name: [] for name in measured}
    for round_number in range(num_rounds + 1):
        for name, seconds_of in measured.items():
            elapsed = seconds_of()
            if round_number:
                times[name].append(elapsed)
    for name in peers.names:
        peers.check(name, layer_bytes)
    return times


RATIOS = {
    "shm_vs_memcpy": ("memcpy", "shm"),
    "ucx_vs_bare_ucxx": ("bare_ucxx", "ucx"),
    "ucx_vs_nixl": ("nixl", "ucx"),
    "ucx_vs_mooncake": ("mooncake", "ucx"),
    "ucx_vs_memcpy": ("memcpy", "ucx"),
    "collective_vs_memcpy": ("memcpy", "collective"),
    "shm_digest_cost": ("shm_digest", "shm"),
    "ucx_digest_cost": ("ucx_digest", "ucx"),
}
"""Seconds of the first over those of the second."""


def _figures(
    times: dict[str, list[float]], label: str, total_bytes: int
) -> tuple[dict[str, float], dict[str, float]]:
    suffix = "" if label == "64mb" else f"_{label}"
    figures = {f"{name}_{label}_gbps": total_bytes / median(values) / 1e9 for name, values in times.items()}
    ratios = {
        f"{name}{suffix}": median(a / b for a, b in zip(times[one], times[other], strict=True))
        for name, (one, other) in RATIOS.items()
        if one in times
    }
    return figures, ratios


def run(*, quick: bool) -> tuple[dict[str, float], dict[str, float], str]:
    """Figures, ratios and what UCX negotiated."""
    sizes = {"64mb": 64 * MIB} if quick else {"64mb": 64 * MIB, "512mb": 512 * MIB}
    num_bytes = max(NUM_LAYERS * _layer_bytes(size) for size in sizes.values())
    context = multiprocessing.get_context("spawn")
    channel, remote = context.Pipe()
    process = context.Process(target=_serve, args=(remote, num_bytes))
    process.start()
    remote.close()
    _pin(0)
    addresses, bare_address = channel.recv()
    regions: dict[str, _Region] = {}
    links: dict[str, Link] = {}
    for name, address in zip(TRANSPORTS, addresses, strict=True):
        transport = make_transport(name, worker_id=WorkerId("bench-source"))
        regions[name] = _Region(transport=transport, memory=transport.allocate(num_bytes).random_(0, 255))
        links[name] = transport.connect(address)
    bare = _BareUcx()
    bare.connect(bare_address)
    peers = PeerEngines(num_bytes)
    for peer, why in peers.missing.items():
        print(f"{peer} is left out: {why}", file=sys.stderr)
    figures: dict[str, float] = {}
    ratios: dict[str, float] = {}
    for label, size in sizes.items():
        layer_bytes = _layer_bytes(size)
        num_rounds = 9 if size <= 64 * MIB else 5
        times = _measure(
            channel, regions, links, bare, peers=peers, layer_bytes=layer_bytes, num_rounds=num_rounds
        )
        more_figures, more_ratios = _figures(times, label, NUM_LAYERS * layer_bytes)
        figures.update(more_figures)
        ratios.update(more_ratios)
    detail = links["ucx"].detail
    for region in regions.values():
        region.transport.close()
    bare.close()
    peers.close()
    channel.send(None)
    num_errors = channel.recv()
    process.join()
    if num_errors:
        raise TransportError(f"{num_errors} messages did not arrive whole")
    return figures, ratios, detail


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="64 MB only")
    parser.add_argument("--no-pair", action="store_true", help="leave the workers (exposed_over_prefill_1024) out")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write figures and ratios there")
    arguments = parser.parse_args()
    figures, ratios, detail = run(quick=arguments.quick)
    pairs: tuple[TransportName, ...] = () if arguments.no_pair else ("ucx", "shm")
    for transport in pairs:
        exposed = run_exposed(transport=transport, num_rounds=2 if arguments.quick else 5)
        figures[f"{transport}_exposed_1024_ms"] = exposed["exposed_s"] * 1e3
        figures[f"{transport}_prefill_1024_ms"] = exposed["prefill_s"] * 1e3
        name = "exposed_over_prefill_1024"
        ratios[name if transport == "ucx" else f"{name}_{transport}"] = exposed["ratio"]
    finish(figures, ratios, arguments.json, f"KV transfer between two processes (ucx: {detail})")


if __name__ == "__main__":
    main()
