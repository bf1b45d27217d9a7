"""The few calls of UCXX and UCX that the transport needs, typed. No protocol, no thread: one caller drives a worker.

Two things that UCXX does not offer are asked from UCX itself: what an endpoint negotiated (`ucp_ep_print_info`), and
destroying a worker whose peer will never answer (`ucp_worker_destroy`).
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kv_transfer.device_memory import CUDA_TLS, Memory
from tandem.errors import TransportError

logger = logging.getLogger(__name__)

os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
try:
    import ucxx._lib.libucxx as _ucxx
    from ucxx._lib.arr import Array as _Array
except ImportError as _exc:
    raise TransportError("the ucx transport needs UCXX: pip install ucxx-cu13") from _exc

DEFAULT_TLS = "posix,sysv,cma,tcp"
_SHARED_MEMORY = frozenset({"all", "sm", "shm", "posix", "sysv", "cma", "knem", "xpmem"})
RENDEZVOUS_BYTES = 8192
"""Larger messages are announced and then fetched; smaller ones travel whole with their announcement."""
_FULL_MASK = (1 << 64) - 1
_LANE = re.compile(r"lane\[\d+\]:\s+\d+:(\S+?)/")


class Endpoint:
    """One direction to a worker address."""

    def __init__(self, native: Any, worker: Worker, info: str) -> None:
        self._native = native
        self._worker = worker
        self.lanes = tuple(dict.fromkeys(_LANE.findall(info)))
        self.reads_remote = "read from remote" in info
        """Whether large payloads are fetched by the receiver from the sender's memory, without the sender's help."""

    @property
    def alive(self) -> bool:
        """False once it is closed, or, with error handling, once UCX has found the peer gone."""
        return self._native is not None and bool(self._native.alive)

    def send(self, view: Memory, tag: int) -> Any:
        """Starts a tagged send; the request has `completed` and `check_error()`. `view` must live until then."""
        return self._native.tag_send(_Array(view), _ucxx.UCXXTag(tag))

    def close(self) -> None:
        """Closes it. Only when all its requests have completed: otherwise UCX may wait for the peer, for ever."""
        if not self.alive:
            self._worker.has_broken_off = True
        native, self._native = self._native, None  # or whoever holds this one holds UCXX's worker
        native.close_blocking()

    def break_off(self) -> None:
        """Closes it under unfinished requests, which end with an error in the worker's next steps.

        Only with error handling: by it UCX closes without the peer. UCXX keeps requests that it cancelled in the
        endpoint that they keep (0.52), and with both its worker: that one must be destroyed then, not closed.
        """
        self._worker.has_broken_off = True
        self._native.close_blocking()

    def abandon(self) -> None:
        """Leaves it to the end of its worker, which must come next. UCXX's object is never destroyed."""
        _keep_for_ever(self._native)


class Worker:
    """A UCX context and worker in wake-up mode. Raises TransportError when UCX cannot be started with `tls`."""

    def __init__(self, tls: str | None, *, cuda: bool = False) -> None:
        config = {"RNDV_THRESH": str(RENDEZVOUS_BYTES)}
        if tls is not None or "UCX_TLS" not in os.environ:
            config["TLS"] = tls or (f"{DEFAULT_TLS},{CUDA_TLS}" if cuda else DEFAULT_TLS)
        self.shares_memory = _names_shared_memory(config.get("TLS") or os.environ.get("UCX_TLS", ""))
        """Whether UCX may join processes of one host by memory."""
        features = (_ucxx.Feature.TAG, _ucxx.Feature.WAKEUP)
        try:
            self._context: Any = _ucxx.UCXContext(config, feature_flags=features)
            self._worker: Any = _ucxx.UCXWorker(self._context)
            self._worker.init_blocking_progress_mode()
        except (_ucxx.UCXError, RuntimeError) as exc:
            raise TransportError(f"UCX does not start with TLS={config.get('TLS', 'its own choice')}: {exc}") from exc
        self._ucp = _load_ucp()
        self.has_broken_off = False
        """Whether an endpoint was closed, or lost its peer, under unfinished requests."""

    @property
    def fd(self) -> int:
        """Readable when there is something to do, once `arm` said True."""
        return int(self._worker.epoll_file_descriptor)

    def address(self) -> bytes:
        """What `connect` of another worker takes."""
        return bytes(self._worker.address.tobytes())

    def progress(self) -> bool:
        """One step; True when something moved."""
        return bool(self._worker.progress_once())

    def arm(self) -> bool:
        """Whether one may sleep on `fd` now."""
        return bool(self._worker.arm())

    def connect(self, address: bytes, *, error_handling: bool) -> Endpoint:
        """Opens an endpoint. Raises TransportError when the address is not one or cannot be reached."""
        try:
            peer = _ucxx.UCXAddress.create_from_buffer(address)
            native = _ucxx.UCXEndpoint.create_from_worker_address(self._worker, peer, error_handling)
        except (_ucxx.UCXError, RuntimeError, ValueError) as exc:
            raise TransportError(f"UCX cannot reach the peer: {exc}") from exc
        return Endpoint(native, self, self._endpoint_info(native.handle))

    def probe(self, tag: int, mask: int = _FULL_MASK) -> Any:
        """Takes the oldest arrived message whose tag matches: `sender_tag.value`, `length`; None when there is none.

        What is taken must be passed to `receive`.
        """
        found = self._worker.tag_probe(_ucxx.UCXXTag(tag), _ucxx.UCXXTagMask(mask), remove=True)
        return found if found.matched else None

    def receive(self, view: Memory, probed: Any) -> Any:
        """Starts to receive a probed message into `view`, which must have its length."""
        return self._worker.tag_recv_with_handle(_Array(view), probed)

    def close(self) -> None:
        """Frees everything. All requests must have completed: others keep UCXX's objects, and all they hold, alive."""
        if self.has_broken_off:
            self.destroy([])
        else:
            del self._worker, self._context

    def destroy(self, unfinished: Iterable[Any]) -> None:
        """Frees everything under `unfinished` requests. They must have left for the peer: UCX aborts over queued ones.

        Their memory must stay valid until this returns. UCXX's objects are kept from ever touching UCX's again: a
        request's end would cancel it in the worker that is gone.
        """
        _keep_for_ever(*unfinished, self._worker, self._context)
        epoll_fd = self.fd
        self._ucp.ucp_worker_destroy(self._worker.handle)
        self._ucp.ucp_cleanup(self._context.handle)
        os.close(epoll_fd)
        del self._worker, self._context

    def leave(self, unfinished: Iterable[Any]) -> None:
        """Frees nothing, ever: for a worker that can neither be closed nor destroyed."""
        _keep_for_ever(*unfinished, self._worker, self._context)
        del self._worker, self._context

    def _endpoint_info(self, handle: int) -> str:
        text, size = ctypes.c_void_p(), ctypes.c_size_t()
        stream = _LIBC.open_memstream(ctypes.byref(text), ctypes.byref(size))
        if not stream:
            raise TransportError("no memory to describe an endpoint in")
        self._ucp.ucp_ep_print_info(handle, stream)
        _LIBC.fclose(stream)
        try:
            return ctypes.string_at(text, size.value).decode(errors="replace")
        finally:
            _LIBC.free(text)


def _keep_for_ever(*wrappers: Any) -> None:
    """UCXX's objects are then never destroyed, whoever lets go of them."""
    for wrapper in wrappers:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(wrapper))


def _names_shared_memory(tls: str) -> bool:
    """Whether UCX's list of transports has one over memory of the host; one of those left out (^) leaves some."""
    names = {name.strip().partition(":")[0] for name in tls.split(",")}
    return not tls or tls.startswith("^") or bool(names & _SHARED_MEMORY)


def _load_ucp() -> Any:
    """The libucp that UCXX runs on."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if "/libucp.so" in path:
            library = ctypes.CDLL(path)
            library.ucp_ep_print_info.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
            library.ucp_worker_destroy.argtypes = [ctypes.c_void_p]
            library.ucp_cleanup.argtypes = [ctypes.c_void_p]
            return library
    raise TransportError("UCXX is loaded without libucp")


_LIBC = ctypes.CDLL(None)
_LIBC.open_memstream.restype = ctypes.c_void_p
_LIBC.open_memstream.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
_LIBC.fclose.argtypes = [ctypes.c_void_p]
_LIBC.free.argtypes = [ctypes.c_void_p]
