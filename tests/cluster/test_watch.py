"""`tandem status --watch`: what is drawn, what is left out, and that it outlives the router."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from cluster.pool_wait import describe
from cluster.status_view import print_status
from cluster.watch import LineScreen, LiveScreen, watch
from cluster.watch_view import Look, bar, headline, line, rates, render
from tandem.rpc.tandem.v1.inference_pb2 import ClusterStatus, LinkStatus, PoolStatus, WorkerStatus
from tests.router_harness import running, saying

NOBODY = "127.0.0.1:1"


def make_status(*, num_tokens: int = 1000, num_bytes: int = 5_000_000, epoch: int = 1, **fields: Any) -> ClusterStatus:
    link = LinkStatus(
        peer_worker_id="decode-0", transport="ucx", detail="cma; fetched", num_bytes=num_bytes, bytes_per_s=2e9
    )
    common = {"state": "ready", "num_blocks": 100, "num_tokens": num_tokens, "epoch": epoch}
    workers = [
        WorkerStatus(worker_id="prefill-0", role="prefill", num_free_blocks=100, links=[link], **common),
        WorkerStatus(worker_id="decode-0", role="decode", num_free_blocks=25, num_running=3, **common),
    ]
    pools = [PoolStatus(role="prefill", desired=1, num_ready=1), PoolStatus(role="decode", desired=4, num_ready=1)]
    values = {"workers": workers, "pools": pools, "model": "m", "num_running_requests": 3, "has_controller": True}
    return ClusterStatus(**{**values, **fields})


def drawn(before: Look | None, now: Look, **options: Any) -> str:
    console = Console(width=150, record=True, file=StringIO())
    console.print(render(before, now, **options))
    return console.export_text()


def row(text: str, name: str) -> list[str]:
    return next(words.split() for words in text.splitlines() if words.lstrip().startswith(name))


def test_rates_are_differences_between_two_looks() -> None:
    before = Look(status=make_status(num_tokens=1000, num_bytes=1_000_000), at_s=10.0)
    now = Look(status=make_status(num_tokens=1100, num_bytes=5_000_000), at_s=12.0)
    measured = rates(before, now)
    assert measured.tokens == {"prefill-0": 50.0, "decode-0": 50.0}
    assert measured.link_bytes == {("prefill-0", "decode-0"): 2e6}


def test_a_worker_that_was_started_again_has_no_rate_yet() -> None:
    before = Look(status=make_status(num_tokens=1000, epoch=1), at_s=10.0)
    now = Look(status=make_status(num_tokens=7, epoch=2), at_s=11.0)
    assert rates(before, now).tokens == {}


def test_a_worker_that_did_not_answer_has_no_rate() -> None:
    silent = make_status(workers=[WorkerStatus(worker_id="decode-0", role="decode", state="unreachable", epoch=1)])
    assert rates(Look(status=silent, at_s=10.0), Look(status=make_status(), at_s=11.0)).tokens == {}


def test_a_worker_that_was_late_with_its_answer_has_no_rate_and_is_marked() -> None:
    worker = WorkerStatus(worker_id="decode-0", role="decode", state="ready", epoch=1, is_late=True)
    late = make_status(workers=[worker])
    assert rates(Look(status=late, at_s=10.0), Look(status=make_status(), at_s=11.0)).tokens == {}
    assert row(drawn(None, Look(status=late, at_s=0.0)), "decode-0")[1] == "ready?"


def test_a_pool_without_a_ready_worker_is_said_and_the_worker_that_comes_is_shown() -> None:
    lost = WorkerStatus(worker_id="decode-0", role="decode", state="lost")
    status = make_status(workers=[lost], pools=[PoolStatus(role="decode", desired=1)])
    console = Console(width=80, record=True, file=StringIO())
    print_status(status, console)
    text = console.export_text()
    assert "no decode worker is ready" in text.replace("\n", " ")
    assert row(text, "decode-0")[1] == "lost"


def test_bytes_over_a_link_to_a_workers_successor_are_counted_from_its_start() -> None:
    def look(at_s: float, epoch: int, num_bytes: int) -> Look:
        link = LinkStatus(peer_worker_id="decode-0", peer_epoch=epoch, num_bytes=num_bytes)
        worker = WorkerStatus(worker_id="prefill-0", role="prefill", state="ready", epoch=1, links=[link])
        return Look(status=make_status(workers=[worker]), at_s=at_s)

    assert rates(look(10.0, 1, 900), look(12.0, 2, 1000)).link_bytes == {("prefill-0", "decode-0"): 500.0}


def test_pools_show_what_is_wanted_and_what_is_there() -> None:
    text = drawn(None, Look(status=make_status(), at_s=0.0))
    assert row(text, "decode ")[1:] == ["4", "1", "0", "3", "0", "-"]


def test_blocks_are_a_bar_and_links_have_their_speed() -> None:
    before = Look(status=make_status(num_bytes=1_000_000), at_s=10.0)
    text = drawn(before, Look(status=make_status(num_bytes=5_000_000), at_s=12.0))
    assert "███████████████░░░░░" in text
    assert "75/100" in text
    assert row(text, "prefill-0 →")[3:] == ["ucx:", "cma", "5.0", "MB", "2.0", "MB/s", "2", "GB/s"]


@pytest.mark.parametrize(
    ("used", "total", "filled"), [(0, 100, 0), (1, 1000, 1), (50, 100, 10), (100, 100, 20), (0, 0, 0)]
)
def test_a_bar_shows_that_something_is_used_even_when_it_is_little(used: int, total: int, filled: int) -> None:
    assert bar(used, total).plain == "█" * filled + "░" * (20 - filled)


def test_a_missing_controller_is_said() -> None:
    assert "no controller" in drawn(None, Look(status=make_status(has_controller=False), at_s=0.0))
    assert "no controller" not in drawn(None, Look(status=make_status(), at_s=0.0))


def test_a_line_says_the_same_for_logs() -> None:
    before = Look(status=make_status(num_tokens=1000, num_bytes=1_000_000), at_s=10.0)
    text = line(before, Look(status=make_status(num_tokens=1100, num_bytes=5_000_000), at_s=12.0))
    assert text == (
        "3 open requests · prefill 1/1 ready, 0/100 blocks, 50.0 tokens/s · "
        "decode 1/4 ready, 75/100 blocks, 50.0 tokens/s · KV 2.0 MB/s"
    )


def test_the_plain_status_shows_desired_sizes_too() -> None:
    console = Console(width=160, record=True, file=StringIO())
    print_status(make_status(), console)
    assert row(console.export_text(), "decode ")[1:4] == ["4", "1", "0"]


@pytest.mark.parametrize("width", [60, 80, 100])
def test_the_plain_status_fits_a_narrow_terminal(width: int) -> None:
    lanes = ", ".join(f"rc_mlx5/mlx5_{i}:1" for i in range(12))
    link = LinkStatus(
        peer_worker_id="decode-10",
        transport="ucx",
        detail=f"{lanes}; pushed",
        num_bytes=123_456_789_012,
        num_messages=123_456,
        bytes_per_s=1.234e10,
        probed_bytes_per_s=12.3e9,
        latency_s=45e-6,
        slow=True,
    )
    worker = WorkerStatus(
        worker_id="prefill-10", role="prefill", state="ready", address="127.0.0.1:40000", transport="ucx", links=[link]
    )
    console = Console(width=width, record=True, file=StringIO())
    print_status(make_status(workers=[worker]), console)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    assert len(text.splitlines()) == 8
    for word in ("prefill-10 → decode-10", "ucx: ", "127.0.0.1:40000", "12.3!", "45", "123456"):
        assert word in text


def test_what_was_probed_and_what_requests_moved_are_told_apart() -> None:
    link = LinkStatus(peer_worker_id="decode-0", transport="shm", probed_bytes_per_s=3e9, bytes_per_s=12.6e6)
    worker = WorkerStatus(worker_id="prefill-0", role="prefill", state="ready", links=[link])
    console = Console(width=160, record=True, file=StringIO())
    print_status(make_status(workers=[worker]), console)
    assert "probed GB/s  moved GB/s  probed µs" in console.export_text(clear=False)
    assert row(console.export_text(), "prefill-0 →")[-3:] == ["3", "0.013", "0"]


def test_all_that_was_negotiated_is_shown_on_demand() -> None:
    console = Console(width=80, record=True, file=StringIO())
    print_status(make_status(), console, verbose=True)
    assert "prefill-0 → decode-0: ucx negotiated cma; fetched" in console.export_text()


def test_what_a_worker_computes_with_is_shown_on_demand() -> None:
    worker = WorkerStatus(worker_id="decode-0", role="decode", state="ready", compute="cpu, float32, attention avx2")
    console = Console(width=80, record=True, file=StringIO())
    print_status(make_status(workers=[worker]), console, verbose=True)
    assert "decode-0: computes on cpu, float32, attention avx2" in console.export_text()


def test_the_transport_is_known_before_any_link() -> None:
    worker = WorkerStatus(worker_id="decode-0", role="decode", state="ready", transport="shm")
    console = Console(width=80, record=True, file=StringIO())
    print_status(make_status(workers=[worker]), console)
    assert "shm" in row(console.export_text(), "decode-0")


def test_a_router_that_shuts_down_says_so() -> None:
    now = Look(status=make_status(is_draining=True), at_s=0.0)
    console = Console(width=150, record=True, file=StringIO())
    print_status(now.status, console)
    assert all("shutting down" in text for text in (drawn(None, now), console.export_text(), line(None, now)))


@pytest.mark.parametrize(
    ("num_running", "workers", "said"),
    [
        (3, ["prefill-0", "decode-0"], "3 open requests · shutting down: new requests are refused, running ones may"),
        (0, ["prefill-0", "decode-0"], "new requests are refused, none is left; prefill-0, decode-0 still to end"),
        (0, [], "new requests are refused, none is left"),
    ],
)
def test_a_cluster_that_shuts_down_says_what_is_still_there(num_running: int, workers: list[str], said: str) -> None:
    left = [WorkerStatus(worker_id=worker_id, role=worker_id.partition("-")[0]) for worker_id in workers]
    status = make_status(is_draining=True, num_running_requests=num_running, workers=left)
    assert said in headline(status).plain


def test_workers_that_no_node_has_room_for_are_counted_with_their_reason() -> None:
    why = "too few free GPUs on the nodes"
    waiting = [
        WorkerStatus(worker_id=f"decode-{n}", role="decode", state="waiting", waits_for=why) for n in range(2)
    ]
    status = make_status(workers=waiting, pools=[PoolStatus(role="decode", desired=2, num_unplaced=2)])
    said = f"decode: 2 workers wait for a node with room: {why}"
    console = Console(width=150, record=True, file=StringIO())
    print_status(status, console)
    now = Look(status=status, at_s=0.0)
    assert said in console.export_text()
    assert said in drawn(None, now)
    assert "2 without room" in line(None, now)
    assert describe(status.pools[0]) == "decode: 0 of 2 ready, 2 wait for a node with room"


@asynccontextmanager
async def watching(endpoint: str, screen: Any) -> AsyncIterator[None]:
    task = asyncio.create_task(watch(endpoint, screen, interval_s=0.05))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until_written(lines: list[str], part: str) -> None:
    deadline = time.monotonic() + 20
    while not any(part in line for line in lines):
        assert time.monotonic() < deadline, lines
        await asyncio.sleep(0.01)
    lines.clear()


def test_a_watch_outlives_the_router_and_finds_the_next_one() -> None:
    async def run() -> None:
        lines: list[str] = []
        async with running(saying("x")) as router:
            endpoint = router.grpc_address
            port = int(endpoint.rpartition(":")[2])
            async with watching(endpoint, LineScreen(lines.append)):
                await until_written(lines, "prefill 1 ready")
                await router.stop(0)
                await until_written(lines, "no router answers at")
                async with running_on(port):
                    await until_written(lines, "prefill 1 ready")

    asyncio.run(run())


@asynccontextmanager
async def running_on(port: int) -> AsyncIterator[None]:
    from router.app import serve_frontend
    from tandem.config import ClusterConfig, RouterConfig
    from tests.router_harness import make_frontend

    config = ClusterConfig(router=RouterConfig(grpc_port=port, http_port=0))
    router = await serve_frontend(make_frontend(saying("x"), http_port=0), config=config)
    try:
        yield
    finally:
        await router.stop(0)


def test_while_no_router_answers_the_last_look_stays_with_a_note() -> None:
    console = Console(width=150, file=StringIO(), force_terminal=True, color_system=None)
    screen = LiveScreen(console)
    from tandem.errors import ClusterError

    with screen.showing():
        screen.look(None, Look(status=make_status(), at_s=0.0))
        screen.absent(ClusterError("no router answers at x"), Look(status=make_status(), at_s=0.0))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    last = text[text.index("retrying") :]
    assert "no router answers at x; retrying" in text
    assert "decode-0" in last


def run_command(*arguments: str, stdout: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "cluster.cli", "status", "--watch", "--interval", "0.1", *arguments]
    return subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE)


def test_ctrl_c_ends_it_with_0_and_without_a_terminal_there_are_only_lines() -> None:
    with run_command("--endpoint", NOBODY, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        first = process.stdout.readline().decode()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert first.endswith("; start one with `tandem up` or give --endpoint HOST:PORT; retrying\n")
    assert "\x1b" not in first
    assert (process.returncode, err) == (0, b"")


def test_on_a_terminal_it_draws_and_ctrl_c_ends_it_with_0() -> None:
    ours, theirs = pty.openpty()
    try:
        with run_command("--endpoint", NOBODY, stdout=theirs) as process:
            os.close(theirs)
            seen = b""
            while b"retrying" not in seen:
                seen += os.read(ours, 4096)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=30)
    finally:
        os.close(ours)
    assert b"\x1b[" in seen
    assert (process.returncode, err) == (0, b"")
