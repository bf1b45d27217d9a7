"""One container: its command as a process of this machine, its probes, and its end.

What it started and did not end is ended with it, wherever that went: every process of a container carries its mark.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.processes import marked, spawn, sweep
from tests.kube.images import entrypoint
from tests.kube.pod_env import expand
from tests.kube.probes import Probe, ProbeSettings, ProbeState, http_answers

MARK = "KUBE_CONTAINER"
KILLED = "killed: did not end within"
"""In the log of a container that had to be ended by force."""
NOT_STARTED = 128
"""Exit status of a container whose command could not be started."""
_PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
_PROGRAM_PERIODS = 3
"""A probe that runs a program asks so many times less often than others; at its own period once it has succeeded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Where a container runs. `env` is complete, `log` takes its output."""

    pod_uid: str
    pod_ip: str
    env: Mapping[str, str]
    directory: Path
    log: Path
    longest_period_s: float


class Container:
    """A container of a spec; `start` may be called again when its process has ended."""

    def __init__(self, spec: Mapping[str, Any], setting: Setting) -> None:
        self.spec = spec
        self.name = str(spec["name"])
        self.num_starts = 0
        self.exit_status: int | None = None
        self.ended_s = 0.0
        self._setting = setting
        self._process: subprocess.Popen[bytes] | None = None
        self._verdicts: dict[str, bool] = {}
        self._stop_probes = threading.Event()
        self._probes: list[threading.Thread] = []

    # --- what it is like

    @property
    def pid(self) -> int | None:
        """Its process, while it runs."""
        return None if self._process is None else self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether its process is there."""
        return self._process is not None

    @property
    def is_started(self) -> bool:
        """Whether it runs and its startup probe, if it has one, has succeeded."""
        return self.is_running and ("startupProbe" not in self.spec or self._verdicts.get("startupProbe", False))

    @property
    def is_ready(self) -> bool:
        """Whether it may get requests."""
        return self.is_started and ("readinessProbe" not in self.spec or self._verdicts.get("readinessProbe", False))

    @property
    def shown(self) -> tuple[object, ...]:
        """All that a pod's status says of it."""
        return self.is_running, self.is_started, self.is_ready, self.num_starts, self.exit_status

    @property
    def should_restart(self) -> bool:
        """Whether its startup or liveness probe has given it up."""
        return self.is_running and any(
            self._verdicts.get(name) is False for name in ("startupProbe", "livenessProbe")
        )

    @property
    def _mark(self) -> str:
        return f"{self._setting.pod_uid}/{self.name}/{self.num_starts}"

    # --- its life

    def start(self) -> None:
        """Starts the process and its probes; a command that is not there counts as ended."""
        self.num_starts += 1
        self.exit_status = None
        self._verdicts = {}
        command = self._command()
        is_path = "/" in command[0]  # it may be in a mount, which only the container sees
        program = command[0] if is_path else shutil.which(command[0], path=self._setting.env["PATH"])
        with self._setting.log.open("ab") as log:
            if program is None:
                log.write(f"{command[0]}: no such program in the image\n".encode())
                self.exit_status, self.ended_s = NOT_STARTED, time.monotonic()
                return
            self._process = spawn(
                [program, *command[1:]],
                output=log,
                death_signal=signal.SIGKILL,
                cwd=self._setting.directory,
                env=self._environment(),
            )
        self._start_probes()

    def _environment(self) -> dict[str, str]:
        return {**self._setting.env, MARK: self._mark, "SPT_NOENV": "1"}  # Ray's titles would go over the mark

    def _command(self) -> list[str]:
        command = list(self.spec.get("command", ())) or list(entrypoint(self.spec["image"]))
        return [self._own(word) for word in [*command, *self.spec.get("args", ())]]

    def _own(self, word: str) -> str:
        return expand(word, self._setting.env)

    def poll(self) -> int | None:
        """The exit status, once the process has ended; then nothing of the container is left."""
        if self._process is not None and (status := self._process.poll()) is not None:
            self._end_rest(status)
        return self.exit_status

    def stop(self, grace_s: float) -> None:
        """preStop, SIGTERM, and SIGKILL for what is left after so many seconds. Returns when all of it is gone."""
        process = self._process
        if process is None:
            return
        give_up = time.monotonic() + grace_s
        self._stop_probes.set()
        self._run_pre_stop(grace_s)
        process.send_signal(getattr(signal, self.spec.get("lifecycle", {}).get("stopSignal", "SIGTERM")))
        try:
            status = process.wait(max(0.0, give_up - time.monotonic()))
        except subprocess.TimeoutExpired:
            with self._setting.log.open("ab") as log:
                log.write(f"{KILLED} {grace_s:g} s\n".encode())
            process.kill()
            status = process.wait()
        self._end_rest(status)

    def _run_pre_stop(self, grace_s: float) -> None:
        hook = self.spec.get("lifecycle", {}).get("preStop", {})
        if "sleep" in hook:
            time.sleep(min(hook["sleep"]["seconds"], grace_s))
        elif "exec" in hook:
            if not self.execute(hook["exec"]["command"], grace_s):
                with self._setting.log.open("ab") as log:
                    log.write(b"preStop hook failed\n")
        elif "httpGet" in hook:
            http_answers(hook["httpGet"], self._setting.pod_ip, self._ports(), timeout_s=grace_s)

    def _end_rest(self, status: int) -> None:
        self._stop_probes.set()
        while left := marked(MARK, self._mark):  # what dies may have started another one meanwhile
            sweep(left, timeout_s=0.0)
        for thread in self._probes:
            thread.join()
        self._process, self._probes = None, []
        self.exit_status, self.ended_s = status if status >= 0 else 128 - status, time.monotonic()

    # --- its probes

    def execute(self, command: list[str], timeout_s: float) -> bool:
        """Runs a command in the container; whether it ended with 0 in time. What it says goes to the log."""
        with self._setting.log.open("ab") as log:
            try:
                done = subprocess.run(
                    [self._own(word) for word in command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self._setting.directory,
                    env=self._environment(),
                    timeout=timeout_s,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                log.write(f"{command[0]}: not done within {timeout_s:g} s\n".encode())
                return False
            except FileNotFoundError:
                log.write(f"{command[0]}: no such program in the image\n".encode())
                return False
        return done.returncode == 0

    def _ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.spec.get("ports", ()) if "name" in port}

    def _start_probes(self) -> None:
        self._stop_probes = threading.Event()
        self._probes = [
            threading.Thread(target=self._run_probe, args=(name, self._stop_probes), name=f"{self.name} {name}")
            for name in _PROBES
            if name in self.spec
        ]
        for thread in self._probes:
            thread.start()

    def _run_probe(self, name: str, stop: threading.Event) -> None:
        normal = ProbeSettings.of(self.spec[name])
        settings = normal.hurried(self._setting.longest_period_s)
        state = ProbeState(settings)
        probe = Probe(spec=self.spec[name], host=self._setting.pod_ip, ports=self._ports(), execute=self.execute)
        if stop.wait(settings.initial_delay_s):
            return
        while True:
            if name == "startupProbe" or self.is_started:  # the others wait for it
                state.note(probe.ask(settings.timeout_s))
                if not stop.is_set() and state.verdict is not None:
                    self._verdicts[name] = state.verdict
            period_s = settings.period_s
            if "exec" in self.spec[name]:  # a program each time, which takes time from what it asks about
                period_s = normal.period_s if state.verdict else min(normal.period_s, _PROGRAM_PERIODS * period_s)
            if stop.wait(period_s):
                return
            if name == "startupProbe" and state.verdict:
                return


def log_of(path: Path) -> str:
    """What a container has written, as far as it is text."""
    return path.read_text(errors="replace") if path.exists() else ""
