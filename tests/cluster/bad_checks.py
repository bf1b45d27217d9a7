"""Checks that misbehave in every way a real one could, for tests of the doctor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from cluster.checks.finding import Finding, Reporter, Settings


def fine(settings: Settings) -> list[Finding]:
    print("noise on stdout")
    return Reporter("fine").ok("all is well")


def hang(settings: Settings) -> list[Finding]:
    """With a grandchild that would outlive it."""
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]):
        signal.pause()
    return []


def fail(settings: Settings) -> list[Finding]:
    raise RuntimeError("something unforeseen")


def die(settings: Settings) -> list[Finding]:
    os.kill(os.getpid(), signal.SIGSEGV)
    return []


def answer_half(settings: Settings) -> list[Finding]:
    os.write(int(sys.argv[3]), b'[{"check": "half"')
    os._exit(3)
