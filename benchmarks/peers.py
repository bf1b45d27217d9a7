"""The other engines of `benchmarks.transfer`: a process in the environment of `make bench-peers`, asked in lines."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = ROOT / ".venv-peers"
NAMES = ("nixl", "mooncake")


class PeerEngines:
    """Those of NAMES that can be started here; `missing` says why the others cannot."""

    def __init__(self, num_bytes: int) -> None:
        self.missing: dict[str, str] = {}
        self.names: list[str] = []
        self._process: subprocess.Popen[str] | None = None
        python = ENVIRONMENT / "bin" / "python"
        if not python.exists():
            self.missing = dict.fromkeys(NAMES, "run `make bench-peers` first")
            return
        libraries = ":".join(str(path) for path in sorted(ENVIRONMENT.glob("deb/root/**/x86_64-linux-gnu")))
        self._process = subprocess.Popen(
            [str(python), str(Path(__file__).with_name("peer_engines.py")), str(num_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "LD_LIBRARY_PATH": libraries, "PYTHONPATH": ""},
        )
        for name in NAMES:
            answer = self._ask(f"open {name}")
            if "ok" in answer:
                self.names.append(name)
            else:
                self.missing[name] = answer["error"]

    def run(self, name: str, layer_bytes: int) -> float:
        """Seconds that the engine took for all layers, by its own process's clock."""
        return float(self._result(f"run {name} {layer_bytes}"))

    def check(self, name: str, layer_bytes: int) -> None:
        """Raises RuntimeError when the destination does not have the source's bytes."""
        if not self._result(f"check {name} {layer_bytes}"):
            raise RuntimeError(f"{name}: the bytes did not arrive")

    def close(self) -> None:
        """Ends the processes."""
        if self._process is not None:
            self._process.communicate("close\n", timeout=60)

    def _result(self, command: str) -> Any:
        answer = self._ask(command)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["ok"]

    def _ask(self, command: str) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(command, file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        return json.loads(line) if line else {"error": "the process ended"}
