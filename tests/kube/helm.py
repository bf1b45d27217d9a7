"""The real helm and kubectl, run against a stand-in."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.kube.images import REPOSITORY

TOOLS = REPOSITORY / ".tools" / "bin"
TIMEOUT_S = 330


def find_tool(name: str) -> str:
    """The path of helm or kubectl; skips the test that asks where there is none."""
    found = shutil.which(name, path=f"{TOOLS}:{os.environ.get('PATH', '')}")
    if found is None:
        pytest.skip(f"no {name} here: `make helm-tools` brings it")
    return found


class CommandFailed(AssertionError):
    """A command that ended with another status than 0; the message has what it said."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tools:
    """helm and kubectl with a home of their own, in which nothing of the user's is read or written."""

    kubeconfig: Path
    home: Path

    def helm(self, *arguments: str | Path, timeout_s: float = TIMEOUT_S) -> str:
        """Runs helm; what it printed. Raises CommandFailed."""
        return self._run(find_tool("helm"), *arguments, timeout_s=timeout_s)

    def kubectl(self, *arguments: str | Path, timeout_s: float = TIMEOUT_S) -> str:
        """The same with kubectl."""
        return self._run(find_tool("kubectl"), *arguments, timeout_s=timeout_s)

    def _run(self, *words: str | Path, timeout_s: float) -> str:
        env = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "KUBECONFIG": str(self.kubeconfig),
        }
        done = subprocess.run(
            [str(word) for word in words],
            capture_output=True,
            text=True,
            env=env,
            timeout=timeout_s,
            check=False,
        )
        if done.returncode:
            raise CommandFailed(f"{' '.join(map(str, words[:3]))}: {done.stdout}{done.stderr}")
        return done.stdout
