"""Typed errors across gRPC: a TandemError to a status with trailing metadata, and a failed call back to a TandemError.

Trailing metadata: `tandem-code` (the error's stable name), `tandem-param` (the field to blame), `retry-after`
(seconds). Owns the translation only; which status an error has is the table's in `tandem/errors.py`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Never

import grpc

from tandem.errors import (
    BY_CODE,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    RequestCancelled,
    TandemError,
    Unauthenticated,
    WorkerUnavailable,
    wire_status,
)

CODE_KEY = "tandem-code"
PARAM_KEY = "tandem-param"
RETRY_AFTER_KEY = "retry-after"

_LOG = logging.getLogger(__name__)

_BY_STATUS: dict[grpc.StatusCode, type[TandemError]] = {
    grpc.StatusCode.UNAVAILABLE: WorkerUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: RequestCancelled,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
}


def status_code(error: TandemError) -> grpc.StatusCode:
    """The gRPC status of `error`."""
    code: grpc.StatusCode = grpc.StatusCode[wire_status(error).grpc]
    return code


def trailing_metadata(error: TandemError) -> tuple[tuple[str, str], ...]:
    """What travels beside the status; values are ASCII, as gRPC demands."""
    pairs = [(CODE_KEY, error.code)]
    if error.param is not None:
        pairs.append((PARAM_KEY, error.param.encode("ascii", "backslashreplace").decode("ascii")))
    if error.retry_after_s is not None:
        pairs.append((RETRY_AFTER_KEY, f"{error.retry_after_s:g}"))
    return tuple(pairs)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: TandemError) -> Never:
    """Ends the call with the status of `error`. Always raises."""
    await context.abort(status_code(error), error.message, trailing_metadata(error))


class typed_errors:
    """Around a handler's body: a TandemError ends the call with its status, a bug with INTERNAL and a logged trace.

    `async with typed_errors(context): ...`
    """

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._context = context

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, TandemError):
            await abort(self._context, error)
        if isinstance(error, Exception) and not isinstance(error, grpc.aio.AbortError):
            _LOG.error("a gRPC handler failed", exc_info=error)
            await abort(self._context, TandemError(f"internal error ({type(error).__name__})"))


def from_rpc_error(error: grpc.aio.AioRpcError) -> TandemError:
    """The TandemError that the peer raised; without `tandem-code`, the one nearest to the status."""
    metadata = _text_metadata(error.trailing_metadata() or ())
    cls = BY_CODE.get(metadata.get(CODE_KEY, "")) or _BY_STATUS.get(error.code(), TandemError)
    message = error.details() or f"the peer ended the call with {error.code().name}"
    if error.code() is grpc.StatusCode.UNAVAILABLE and CODE_KEY not in metadata:
        message = _connection_trouble(message)
    retry_after_s = _seconds(metadata.get(RETRY_AFTER_KEY))
    return cls(message, param=metadata.get(PARAM_KEY), retry_after_s=retry_after_s)


def _connection_trouble(details: str) -> str:
    """gRPC's own words for a connection's end hold addresses and names of system calls; clients need none of them."""
    known = {"reset": "connection reset", "refused": "connection refused", "socket closed": "connection closed"}
    return next((plain for word, plain in known.items() if word in details.lower()), "connection lost")


def is_typed(error: grpc.aio.AioRpcError) -> bool:
    """Whether the peer raised this error itself; otherwise it is the connection's."""
    return CODE_KEY in _text_metadata(error.trailing_metadata() or ())


def _text_metadata(metadata: Iterable[tuple[str, str | bytes]]) -> dict[str, str]:
    return {key: value for key, value in metadata if isinstance(value, str)}


def _seconds(text: str | None) -> float | None:
    """A peer's number; None where it is absent or no usable number."""
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None
