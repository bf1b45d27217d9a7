"""A whole cluster for a benchmark, started and stopped as a user does it: `tandem up` in a process of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

_POLL_S = 0.02


@contextmanager
def cluster_up(directory: Path, config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the ready file's content; stops the cluster at the end. Raises RuntimeError when it does not start."""
    config_file, ready_file = directory / "config.yaml", directory / "ready.json"
    config_file.write_text(yaml.safe_dump({**config, "router": {"grpc_port": 0, "http_port": 0}}))
    tandem = str(Path(sys.executable).parent / "tandem")
    command = [tandem, "up", "--config", str(config_file), "--ready-file", str(ready_file)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            while not ready_file.exists():
                if process.poll() is not None:
                    raise RuntimeError(f"`tandem up` ended with status {process.returncode}")
                time.sleep(_POLL_S)
            yield json.loads(ready_file.read_text())
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()
