"""`tandem doctor`: runs every check in a process of its own, under a deadline, and shows what they found.

A check that hangs is ended, one that crashes is reported as that; neither keeps the others from being run.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import IO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cluster.checks.__main__ import SETTINGS_VARIABLE
from cluster.checks.finding import Finding, Settings, State
from cluster.checks.table import CHECKS, CheckSpec
from cluster.processes import spawn
from cluster.timeline import plural

NUM_PARALLEL = 2
_GONE_S = 2.0
_PIPE_BYTES = 65_536
_STYLES = {State.OK: "green", State.WARNING: "yellow", State.PROBLEM: "bold red", State.SKIPPED: "dim"}


@dataclass(kw_only=True, eq=False)
class _Running:
    """A check's process, the pipe that its findings come through, and the file that its noise goes to."""

    spec: CheckSpec
    process: subprocess.Popen[bytes]
    answers: int
    noise: IO[bytes]
    give_up_s: float
    answer: bytes = b""

    def has_ended(self) -> bool:
        """Takes what is in the pipe now; whether that was the end of it."""
        piece = os.read(self.answers, _PIPE_BYTES)
        self.answer += piece
        return not piece

    def findings(self) -> list[Finding]:
        """Once the pipe has ended: what it said, or how it failed."""
        try:
            return [Finding.from_mapping(values) for values in json.loads(self.answer)]
        except ValueError:  # no answer, or half of one
            return self._crash()

    def _crash(self) -> list[Finding]:
        status = self._status()
        self.noise.seek(0)
        lines = [line.strip() for line in self.noise.read().decode(errors="replace").splitlines() if line.strip()]
        how = f"signal {-status}" if status < 0 else f"status {status}"
        return _failure(self.spec, f"the check itself crashed ({how}): {lines[-1] if lines else 'no message'}")

    def _status(self) -> int:
        """The exit status; killed first where it closed its pipe and goes on."""
        try:
            return self.process.wait(_GONE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def overdue(self) -> list[Finding]:
        """What to say of a check that had to be ended."""
        return _failure(self.spec, f"the check was still waiting after {self.spec.deadline_s:g} s and was ended")

    def close(self) -> None:
        """Ends whatever of it is left: it leads a process group of its own."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        os.close(self.answers)
        self.noise.close()


def _failure(spec: CheckSpec, found: str) -> list[Finding]:
    advice = "what it looks at could not be judged; the other checks do not depend on it"
    return [Finding(check=spec.name, state=State.PROBLEM, found=found, advice=advice)]


def _start(spec: CheckSpec, settings: Settings) -> _Running:
    read_fd, write_fd = os.pipe()
    noise = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process that writes to it
    command = [sys.executable, "-m", "cluster.checks", spec.place, spec.name, str(write_fd)]
    try:
        process = spawn(
            command,
            output=noise,
            death_signal=signal.SIGKILL,
            pass_fds=(write_fd,),
            env={**os.environ, SETTINGS_VARIABLE: settings.to_json()},
        )
    except BaseException:
        os.close(read_fd)
        noise.close()
        raise
    finally:
        os.close(write_fd)
    return _Running(
        spec=spec,
        process=process,
        answers=read_fd,
        noise=noise,
        give_up_s=time.monotonic() + spec.deadline_s,
    )


def run_checks(
    settings: Settings,
    specs: Sequence[CheckSpec] = CHECKS,
    *,
    on_start: Callable[[str], None] = lambda name: None,
    on_done: Callable[[str], None] = lambda name: None,
) -> list[Finding]:
    """Findings of all checks in the order of `specs`; `on_start` and `on_done` hear the name of each as it begins and
    when it is over.
    """
    waiting = deque(specs)
    found: dict[str, list[Finding]] = {}
    with selectors.DefaultSelector() as ready:
        try:
            while waiting or ready.get_map():
                while waiting and len(ready.get_map()) < NUM_PARALLEL:
                    running = _start(waiting.popleft(), settings)
                    ready.register(running.answers, selectors.EVENT_READ, running)
                    on_start(running.spec.name)
                for running, findings in _next_ended(ready):
                    found[running.spec.name] = findings
                    ready.unregister(running.answers)
                    running.close()
                    on_done(running.spec.name)
        finally:
            for key in list(ready.get_map().values()):
                key.data.close()
    return [finding for spec in specs for finding in found[spec.name]]


def _next_ended(ready: selectors.BaseSelector) -> list[tuple[_Running, list[Finding]]]:
    """Waits until some check is over, by itself or by its deadline."""
    all_running: list[_Running] = [key.data for key in ready.get_map().values()]
    left_s = min(running.give_up_s for running in all_running) - time.monotonic()
    answering: list[_Running] = [key.data for key, _ in ready.select(max(0.0, left_s))]
    ended = [running for running in answering if running.has_ended()]
    now = time.monotonic()
    late = [running for running in all_running if running.give_up_s <= now and running not in ended]
    return [(running, running.findings()) for running in ended] + [(running, running.overdue()) for running in late]


def has_problem(findings: Sequence[Finding]) -> bool:
    """Whether something will not work."""
    return any(finding.state is State.PROBLEM for finding in findings)


def as_data(findings: Sequence[Finding]) -> dict[str, object]:
    """For programs."""
    return {"problem": has_problem(findings), "findings": [asdict(finding) for finding in findings]}


def print_findings(findings: Sequence[Finding], console: Console) -> None:
    """For people: what was found and, below it, what to do."""
    table = Table("check", "state", "found", box=None, pad_edge=False)
    for finding in findings:
        text = Text(finding.found)
        if finding.advice:
            text.append(f"\n→ {finding.advice}", style=_STYLES[finding.state])
        table.add_row(finding.check, Text(finding.state, style=_STYLES[finding.state]), text)
    console.print(table)
    counts = {state: sum(finding.state is state for finding in findings) for state in State}
    parts = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    num_checks = len({finding.check for finding in findings})
    console.print(f"{plural(len(findings), 'finding')} of {plural(num_checks, 'check')}: {parts}", markup=False)
