"""Ctrl-C and SIGTERM while a cluster starts, on a real terminal: it ends at once and leaves the terminal as it was."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time

import pytest

from cluster.serve import StoppedBySignal, serve, with_cluster
from tests.cluster.terminal import Terminal

TANDEM = (sys.executable, "-m", "cluster.cli")
FREE_PORTS = ("--grpc-port", "0", "--http-port", "0")


class Part:
    """Something that starts and stops; `start_s` is how long it takes, `swallows` that it survives a cancellation."""

    def __init__(self, *, start_s: float = 0.0, swallows: bool = False) -> None:
        self._start_s = start_s
        self._swallows = swallows
        self.starting = asyncio.Event()
        self.stopped = False

    async def __aenter__(self) -> Part:
        self.starting.set()
        try:
            await asyncio.sleep(self._start_s)
        except asyncio.CancelledError:
            if not self._swallows:
                self.stopped = True
                raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stopped = True

    def force_stop(self) -> None:
        raise AssertionError("only one signal was sent")

    def to_json(self) -> str:
        return "{}"


@pytest.mark.parametrize("swallows", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_it_is_up_ends_it_with_the_signals_status(number: signal.Signals, swallows: bool) -> None:
    async def scenario() -> None:
        part = Part(start_s=60.0, swallows=swallows)
        told: list[bool] = []

        async def body(_: Part) -> None:
            raise AssertionError("it was never up")

        running = asyncio.create_task(with_cluster(part, body, on_stop=told.append))
        await part.starting.wait()
        os.kill(os.getpid(), number)
        with pytest.raises(StoppedBySignal) as caught:
            await running
        assert (caught.value.exit_status, caught.value.was_ready) == (128 + number, False)
        assert (told, part.stopped) == ([False], True)

    asyncio.run(scenario())


def test_a_signal_while_it_is_up_is_the_way_to_end_it() -> None:
    async def scenario() -> None:
        part = Part()
        told: list[bool] = []

        async def on_ready(_: Part) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

        await serve(part, ready_file=None, on_ready=on_ready, on_stop=told.append)
        assert (told, part.stopped) == ([True], True)

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "number"),
    [
        (("up", *FREE_PORTS), signal.SIGINT),
        (("demo",), signal.SIGTERM),
        (("start", "--head"), signal.SIGINT),
    ],
)
def test_a_signal_while_ray_starts_ends_the_command_and_its_spinners(
    command: tuple[str, ...], number: signal.Signals
) -> None:
    with Terminal([*TANDEM, *command]) as terminal:
        terminal.read_on(until=" Ray ")
        time.sleep(2.0)  # somewhere in the middle of Ray's start; any moment must do
        began_s = time.monotonic()
        status = terminal.interrupt(number)
        assert time.monotonic() - began_s < 20.0
    assert status == 128 + number
    assert terminal.text.endswith("stopping: once more to stop at once\r\n")
    assert terminal.shows_cursor


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once() -> None:
    with Terminal([*TANDEM, "up", *FREE_PORTS]) as terminal:
        terminal.read_on(until=" Ray ")
        terminal.process.send_signal(signal.SIGINT)
        terminal.read_on(until="stopping")
        assert terminal.interrupt() == 128 + signal.SIGINT
    assert terminal.shows_cursor
    assert "Traceback" not in terminal.text
