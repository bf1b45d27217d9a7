"""What closing links and transports leaves behind: nothing, whatever was under way and however often they come."""

from __future__ import annotations

import gc
import os
import threading
import time
from concurrent.futures import wait

import pytest
import torch

from kv_transfer.transport import Transport
from kv_transfer.transports import make_transport
from tandem.types import WorkerId
from tests.conftest import mapped_by_others
from tests.kv_transfer.kinds import fill
from tests.kv_transfer.peers import TIMEOUT_S, RecordingSink, make_header

MIB = 1 << 20


def _resources() -> tuple[int, int, set[str]]:
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count(), set(os.listdir("/dev/shm"))


def _left(before: tuple[int, int, set[str]]) -> str:
    """What is more than before, in words; segments of other processes are not ours."""
    (descriptors, threads, segments), found = before, _resources()
    new = {name for name in found[2] - segments if not mapped_by_others(name)}
    is_back = found[0] <= descriptors and found[1] <= threads and not new
    return "" if is_back else f"descriptors {descriptors} > {found[0]}, threads {threads} > {found[1]}, segments {new}"


def _exchange(name: str, devices: tuple[torch.device, torch.device], *, finish: bool) -> None:
    source, destination = (
        make_transport(name, worker_id=WorkerId(role), device=device)
        for role, device in zip(("source", "destination"), devices, strict=True)
    )
    sink = RecordingSink(destination.allocate(MIB))
    destination.serve(sink)
    memory = fill(source.allocate(MIB))
    links = [source.connect(destination.address()) for _ in range(3)]
    sends = [link.send(make_header([memory], with_digest=False), [memory]) for link in links for _ in range(20)]
    if finish:
        wait(sends, TIMEOUT_S)
        links[0].close()
    for transport in (source, destination):
        transport.close()
        transport.close()


@pytest.mark.parametrize("finish", [True, False], ids=["finished", "unfinished"])
def test_closing_leaves_no_descriptor_thread_or_segment(
    name: str, devices: tuple[torch.device, torch.device], finish: bool
) -> None:
    _exchange(name, devices, finish=True)
    before = _resources()
    for _ in range(3):
        _exchange(name, devices, finish=finish)
    deadline = time.monotonic() + 10.0
    while _left(before):
        assert time.monotonic() < deadline, _left(before)
        time.sleep(0.05)


@pytest.mark.parametrize("finish", [True, False], ids=["finished", "unfinished"])
def test_links_that_come_and_go_between_two_transports_take_no_more_descriptors(
    source: Transport, destination: Transport, finish: bool
) -> None:
    destination.serve(RecordingSink(destination.allocate(MIB)))
    memory = fill(source.allocate(MIB))

    def come_and_go() -> None:
        link = source.connect(destination.address())
        sends = [link.send(make_header([memory], with_digest=False), [memory]) for _ in range(4)]
        if finish:
            wait(sends, TIMEOUT_S)
        link.close()
        assert not wait(sends, TIMEOUT_S).not_done

    for _ in range(3):
        come_and_go()
    before = _resources()
    for _ in range(24):
        come_and_go()
    descriptors, threads, segments = before
    allowed = (descriptors + 12, threads, segments)  # links that lingered while the next ones came: never all of them
    deadline = time.monotonic() + 10.0
    while _left(allowed):
        assert time.monotonic() < deadline, _left(allowed)
        time.sleep(0.05)
