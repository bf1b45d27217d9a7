"""A program with the router's command line that listens on real ports and says ready; for tests of its supervision."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import time


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in ("--config-json", "--redis-url", "--ready-fd"):
        parser.add_argument(name, required=True)
    parser.add_argument("--stay", action="store_true")  # it has nothing to say after its drain
    arguments = parser.parse_args()
    config = json.loads(arguments.config_json)
    if config["cluster"] == "broken-router":
        print("the router's ports are taken", file=sys.stderr)
        return 1
    after_drain_s = config["drain_timeout_s"] + 2.5 if config["cluster"] == "slow-router" else 0.0

    def leave(*_: object) -> None:
        time.sleep(after_drain_s)
        sys.exit(0)

    signal.signal(signal.SIGTERM, leave)
    sockets = [socket.create_server(("127.0.0.1", config["router"][f"{name}_port"])) for name in ("grpc", "http")]
    grpc, http = (f"127.0.0.1:{server.getsockname()[1]}" for server in sockets)
    lines = [{"grpc": grpc, "http": f"http://{http}", "startup": {"imports": 0.1}}, {"ready": True}]
    for line in lines:
        os.write(int(arguments.ready_fd), json.dumps(line).encode() + b"\n")
    while True:
        signal.pause()


if __name__ == "__main__":
    raise SystemExit(main())
