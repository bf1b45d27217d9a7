"""Shared memory, memory files, and whether one process may read another's."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import subprocess
import sys
from pathlib import Path

from cluster.checks.finding import Finding, Reporter, Settings, size
from cluster.ray_node_settings import OBJECT_STORE_BYTES

WORKER_BYTES = 8 * 2**20
"""What UCX puts there for each worker's queues, on the safe side. KV pools are not in it: they are private memory or
memory files, and count as plain memory."""
_PROBE_BYTES = 1 << 20
_PROBE_TIMEOUT_S = 10.0

_TARGET = """
import ctypes, sys
data = ctypes.create_string_buffer(b"tandem")
print(ctypes.addressof(data), flush=True)
sys.stdin.read()
"""
_READER = """
import ctypes, os, sys
class Piece(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
into = ctypes.create_string_buffer(6)
local, remote = Piece(ctypes.addressof(into), 6), Piece(int(sys.argv[2]), 6)
libc = ctypes.CDLL(None, use_errno=True)
count = libc.process_vm_readv(int(sys.argv[1]), ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
print("ok" if count == 6 and into.raw == b"tandem" else os.strerror(ctypes.get_errno()))
"""


def check_shared_memory(settings: Settings) -> list[Finding]:
    """Size and room of /dev/shm against what the configured workers put there, and whether memory files work."""
    report = Reporter("shared-memory")
    failure = _memory_file_failure()
    if failure:
        return report.problem(f"memory files do not work: {failure}", "allow memfd_create (seccomp) and free memory")
    try:
        room = os.statvfs(settings.shm_dir)
    except OSError as exc:
        return report.problem(f"{settings.shm_dir}: {exc.strerror}", "mount a tmpfs there")
    config = settings.config
    num_workers = config.prefill.num_workers + config.decode.num_workers
    needed = OBJECT_STORE_BYTES + num_workers * WORKER_BYTES
    total, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    found = f"{settings.shm_dir}: {size(free)} of {size(total)} free, {size(needed)} needed; memory files work"
    advice = "enlarge it (Docker: --shm-size; Kubernetes: an emptyDir with medium Memory at /dev/shm)"
    if total < needed:
        return report.problem(found, advice)
    if free < needed:
        return report.warning(found, f"remove what is left over in {settings.shm_dir}, or {advice}")
    return report.ok(found)


def _memory_file_failure() -> str:
    """Empty when a sealed memory file can be made, written and read."""
    pattern = b"tandem" * (_PROBE_BYTES // 6)
    try:
        with os.fdopen(os.memfd_create("tandem-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "wb") as file:
            os.ftruncate(file.fileno(), _PROBE_BYTES)
            fcntl.fcntl(file.fileno(), fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            with mmap.mmap(file.fileno(), _PROBE_BYTES) as memory:
                memory[: len(pattern)] = pattern
                return "" if memory[: len(pattern)] == pattern else "what was written does not read back"
    except OSError as exc:
        return str(exc.strerror)


def check_ptrace(settings: Settings) -> list[Finding]:
    """Whether one of our processes may read a sibling's memory, as UCX's cma transport does. Tried for real."""
    report = Reporter("ptrace")
    scope_file = Path(settings.proc_dir, "sys", "kernel", "yama", "ptrace_scope")
    scope = scope_file.read_text().strip() if scope_file.exists() else "not there"
    if not hasattr(ctypes.CDLL(None), "process_vm_readv"):
        return report.skipped("this system has no process_vm_readv")
    answer = _read_a_sibling()
    found = f"reading a sibling's memory: {answer}; kernel.yama.ptrace_scope is {scope}"
    if answer == "ok":
        return report.ok(found)
    return report.warning(
        f"{found}; UCX copies KV twice instead of once",
        "set kernel.yama.ptrace_scope=0, or give workers CAP_SYS_PTRACE (Docker: --cap-add SYS_PTRACE)",
    )


def _read_a_sibling() -> str:
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _TARGET], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as target:
        assert target.stdout is not None
        address = target.stdout.readline().strip()
        reader = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _READER, str(target.pid), address],
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
        target.communicate()
    return reader.stdout.strip() or reader.stderr.strip().rpartition("\n")[2]
