"""Who a process is: which host and process namespace it lives in, and whether it is still the same one."""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from tandem.errors import TransportError

_STRUCT = struct.Struct("<16sIQ")
IDENTITY_BYTES = _STRUCT.size


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessIdentity:
    """`host` is equal for processes of one boot of one machine that see each other's process ids."""

    host: bytes
    pid: int
    start_ticks: int

    def pack(self) -> bytes:
        """IDENTITY_BYTES bytes."""
        return _STRUCT.pack(self.host, self.pid, self.start_ticks)

    @classmethod
    def unpack(cls, data: bytes) -> ProcessIdentity:
        """Inverse of `pack`. Raises TransportError for anything else."""
        if len(data) != IDENTITY_BYTES:
            raise TransportError(f"a process identity has {IDENTITY_BYTES} bytes, got {len(data)}")
        host, pid, start_ticks = _STRUCT.unpack(data)
        return cls(host=host, pid=pid, start_ticks=start_ticks)


def _start_ticks(pid: int) -> int:
    """Field 22 of /proc/PID/stat. Raises OSError when there is no such process."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[19])


def own_identity() -> ProcessIdentity:
    """Of this process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    namespaces = "".join(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "ipc", "net"))
    host = hashlib.blake2b(boot + namespaces.encode(), digest_size=16, person=b"tandem-host").digest()
    return ProcessIdentity(host=host, pid=os.getpid(), start_ticks=_start_ticks(os.getpid()))


def open_process(identity: ProcessIdentity) -> int:
    """A descriptor that becomes readable when the process (on this host) ends.

    Raises TransportError when it has ended already or the id belongs to another process by now.
    """
    try:
        fd = os.pidfd_open(identity.pid)
    except OSError as exc:
        raise TransportError(f"process {identity.pid} of the peer is gone") from exc
    try:
        if _start_ticks(identity.pid) == identity.start_ticks:
            return fd
    except OSError as exc:
        os.close(fd)
        raise TransportError(f"process {identity.pid} of the peer is gone") from exc
    os.close(fd)
    raise TransportError(f"process {identity.pid} is not the peer any more")
