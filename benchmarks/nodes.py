"""A cluster of several Ray nodes on this machine, each started with `tandem start` as a user would."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 90.0
TANDEM = str(Path(sys.executable).parent / "tandem")


@dataclass
class Started:
    """A `tandem start` that is up. `info` is its ready file."""

    process: subprocess.Popen[bytes]
    info: dict[str, Any]
    log: Path

    def tree(self) -> list[psutil.Process]:
        """The process and all below it."""
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def kill(self) -> None:
        """Ends all of it at once, as when the machine is gone."""
        for process in self.tree():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait()

    def kill_part(self, name: str) -> None:
        """Kills the processes of one name."""
        for process in self.tree():
            if process.name() == name:
                process.kill()

    def stop(self) -> int:
        """SIGTERM; its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_TIMEOUT_S)


@dataclass
class Nodes:
    """Starts heads and nodes over one external Redis, and ends what still runs."""

    directory: Path
    redis_url: str
    config: dict[str, Any]
    started: list[Started] = field(default_factory=list)

    @property
    def config_file(self) -> Path:
        """The configuration that all of them get."""
        path = self.directory / "config.yaml"
        path.write_text(yaml.safe_dump(self.config))
        return path

    def head(self, *arguments: str) -> Started:
        """A head that takes no workers itself."""
        return self._start("--head", "--no-workers", *arguments)

    def node(self, head: Started, node_ip: str) -> Started:
        """A node with room for one worker of each pool."""
        slots = ("--prefill-slots", "1", "--decode-slots", "1")
        return self._start("--address", head.info["head"], "--node-ip", node_ip, *slots)

    def _start(self, *arguments: str) -> Started:
        name = f"start-{len(self.started)}"
        ready, log = self.directory / f"{name}.json", self.directory / f"{name}.log"
        common = ["--config", str(self.config_file), "--redis-url", self.redis_url, "--ready-file", str(ready)]
        with log.open("wb") as output:
            process = subprocess.Popen([TANDEM, "start", *arguments, *common], stdout=output, stderr=subprocess.STDOUT)
        started = Started(process=process, info={}, log=log)
        self.started.append(started)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not ready.exists():
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.05)
        started.info = json.loads(ready.read_text())
        return started

    def end(self) -> None:
        """Ends, last started first, whatever still runs."""
        for started in reversed(self.started):
            if started.process.poll() is None:
                started.process.terminate()
        for started in self.started:
            try:
                started.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                started.kill()
