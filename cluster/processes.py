"""Child processes that cannot outlive this one: spawning, ending, and sweeping up what is left.

Children run in a session of their own, so a Ctrl-C at the terminal reaches only the launcher, which then ends them in
order. On Linux the kernel signals them when the thread that spawned them ends: spawn from a thread that lives on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

_KILLED_S = 2.0
"""How long the kernel may take to end what was killed."""

# Ties the child to its parent, then becomes the real program. A preexec_fn would do the same, but forking with threads
# running may deadlock in it. 1 is PR_SET_PDEATHSIG; the parent may have died before it was set.
_TETHER = """
import ctypes, os, sys
parent, number = int(sys.argv[1]), int(sys.argv[2])
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, number, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)
os.execv(sys.argv[3], sys.argv[3:])
"""


def spawn(
    command: Sequence[str],
    *,
    output: IO[bytes] | None,
    death_signal: signal.Signals,
    cwd: Path | None = None,
    pass_fds: Sequence[int] = (),
    env: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Starts a program that gets `death_signal` when this process ends. `output` None inherits stderr for both streams.

    `command[0]` is an absolute path. Raises OSError when the interpreter cannot be started.
    """
    tether = [sys.executable, "-I", "-S", "-c", _TETHER, str(os.getpid()), str(int(death_signal))]
    sink = sys.stderr.fileno() if output is None else output
    return subprocess.Popen(
        [*tether, *command],
        stdin=subprocess.DEVNULL,
        stdout=sink,
        stderr=sink,
        cwd=cwd,
        pass_fds=tuple(pass_fds),
        env=None if env is None else dict(env),
        start_new_session=True,
    )


def end(process: subprocess.Popen[bytes], *, timeout_s: float) -> bool:
    """Terminates, waits, then kills; True when it ended by itself. Idempotent; the process is reaped."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(timeout=timeout_s)
        return True
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False


def family(mark: str) -> list[psutil.Process]:
    """Our children whose command line contains `mark`, and everything below them."""
    found = []
    for child in psutil.Process().children():
        try:
            if any(mark in word for word in child.cmdline()):
                found += [child, *child.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
    return found


def marked(variable: str, value: str) -> list[psutil.Process]:
    """Processes of this user that have `variable=value` in their environment, whoever is their parent now."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(variable) == value:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def sweep(processes: Iterable[psutil.Process], *, timeout_s: float) -> list[str]:
    """Waits for processes to end, kills those that do not; returns what had to be killed, for people."""
    _, alive = psutil.wait_procs(list(processes), timeout=timeout_s)
    killed = []
    for process in alive:
        try:
            killed.append(f"{process.pid} {process.name()}")
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(alive, timeout=_KILLED_S)
    return killed


def kill_children() -> None:
    """Kills everything below this process and waits a moment for it to be gone."""
    below = psutil.Process().children(recursive=True)
    for process in below:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(below, timeout=_KILLED_S)


def usable_cores() -> list[int]:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def make_temp_dir(kind: str, *, parent: Path | None = None) -> Path:
    """A new directory "tandem-<kind>-<our process id>-..."; whoever finds it can tell whether its owner lives."""
    return Path(tempfile.mkdtemp(prefix=f"tandem-{kind}-{os.getpid()}-", dir=parent))


def last_lines(path: Path, count: int = 1) -> str:
    """The last non-empty lines of a log, for an error message; empty when there is none."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    return "\n".join([line.strip() for line in lines if line.strip()][-count:])
