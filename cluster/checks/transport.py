"""What the transports really negotiate here: bytes are moved between two processes, checked and timed."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import IO

import torch

from cluster.checks.finding import Finding, Reporter, Settings
from cluster.processes import end, spawn
from kv_transfer.digest import digest
from kv_transfer.transport import Link, MessageHeader
from kv_transfer.transports import make_transport
from tandem.config import TransportName
from tandem.errors import TransportError
from tandem.types import Epoch, HandoffId, WorkerId

MESSAGE_BYTES = 2 << 20
NUM_MESSAGES = 8
NUM_ROUNDS = 4
_TIMEOUT_S = 20.0
_SHARED_MEMORY = ("posix", "sysv", "cma", "knem", "xpmem", "cuda_ipc")
"""UCX's transports within a host."""


def check_ucx(settings: Settings) -> list[Finding]:
    """UCX between two processes of this host."""
    report = Reporter("transport-ucx")
    try:
        detail, speed = measure("ucx")
    except (TransportError, OSError) as exc:
        return _failed(report, settings, "ucx", exc)
    found = f"{speed}; negotiated: {detail}"
    if not any(name in detail for name in _SHARED_MEMORY):
        return report.warning(
            f"{found}: within this host bytes take the network's way",
            "let UCX_TLS contain posix and cma, and see the checks shared-memory and ptrace",
        )
    return report.ok(found)


def check_shm(settings: Settings) -> list[Finding]:
    """The shared-memory transport between two processes of this host."""
    report = Reporter("transport-shm")
    try:
        detail, speed = measure("shm")
    except (TransportError, OSError) as exc:
        return _failed(report, settings, "shm", exc)
    return report.ok(f"{speed}; negotiated: {detail}")


def _failed(report: Reporter, settings: Settings, name: TransportName, error: Exception) -> list[Finding]:
    found = f"no bytes can be moved: {error}"
    if settings.config.transfer.transport == name:
        other = "shm" if name == "ucx" else "ucx"
        return report.problem(found, f"repair it, or run with --transport {other} where that one works")
    return report.warning(found, "nothing, as long as it is not the configured transport")


def measure(name: TransportName) -> tuple[str, str]:
    """(what was negotiated, speed for people). Raises TransportError when anything does not arrive whole."""
    torch.set_num_threads(1)
    with _peer(name) as answers:
        transport = make_transport(name, worker_id=WorkerId("doctor-source"))
        try:
            memory = transport.allocate(MESSAGE_BYTES)
            memory.copy_(torch.arange(MESSAGE_BYTES) % 251)
            link = transport.connect(bytes.fromhex(_line(answers)))
            times = [_round(link, memory, answers) for _ in range(NUM_ROUNDS)]
            speed = MESSAGE_BYTES * NUM_MESSAGES / median(times[1:]) / 1e9  # the first round maps memory
            return link.detail, f"{speed:.2f} GB/s, digests included"
        finally:
            transport.close()


def _round(link: Link, memory: torch.Tensor, answers: IO[str]) -> float:
    """Seconds until the peer has checked all messages of a round."""
    started_s = time.perf_counter()
    header = MessageHeader(
        handoff_id=HandoffId("d0c" + "0" * 29),
        epoch=Epoch(1),
        layer=0,
        first_block=0,
        num_blocks=1,
        num_bytes=MESSAGE_BYTES,
        digest=digest([memory]),
    )
    sends = [link.send(header, [memory]) for _ in range(NUM_MESSAGES)]
    for send in sends:
        send.result(_TIMEOUT_S)
    for _ in sends:
        if (word := _line(answers)) != "ok":
            raise TransportError(f"a message did not arrive whole: {word}")
    return time.perf_counter() - started_s


@contextmanager
def _peer(name: TransportName) -> Iterator[IO[str]]:
    """A receiving process; gives the lines that it writes."""
    read_fd, write_fd = os.pipe()
    command = [sys.executable, "-m", "cluster.checks.transport_peer", name, str(MESSAGE_BYTES), str(write_fd)]
    with os.fdopen(read_fd) as answers:
        try:
            process = spawn(command, output=None, death_signal=signal.SIGKILL, pass_fds=(write_fd,))
        finally:
            os.close(write_fd)
        try:
            yield answers
        finally:
            end(process, timeout_s=5.0)


def _line(answers: IO[str]) -> str:
    """The peer's next line. Raises TransportError when it has ended."""
    line = answers.readline()
    if not line:
        raise TransportError("the receiving process ended early")
    return line.strip()
