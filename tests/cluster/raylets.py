"""A process that looks like a raylet in the process table and answers health checks, as one does, on two ports."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

NODE_IP = "127.0.0.77"

_PROGRAM = """
import asyncio, sys
from tandem.rpc.health_port import start_health_port

async def main():
    ports = [await start_health_port(sys.argv[1], 0, ["Raylet"]) for _ in range(2)]
    print("up", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@contextmanager
def running_raylet(node_ip: str = NODE_IP) -> Iterator[subprocess.Popen[bytes]]:
    """Up when its ports are; killed at the end."""
    flags = [f"--node_ip_address={node_ip}", "--node_id=ab12", "--gcs-address=127.0.0.1:1"]
    process = subprocess.Popen(
        ["/ray/raylet", "-c", _PROGRAM, node_ip, *flags],
        executable=sys.executable,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},  # its name hides the virtual environment
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"up\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
