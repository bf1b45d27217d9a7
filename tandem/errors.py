"""The error tree, and the one table from errors to gRPC status, HTTP status and "may it be retried". Pure.

TandemError
+-- RequestError                 the client must change the request
|   +-- InvalidRequest           a field is wrong; names it
|   +-- ContextLengthExceeded    prompt or max_tokens do not fit the model's context
|   +-- ModelNotFound            no such model here
|   +-- RequestNotFound          cancel of a request that does not run here
|   +-- DuplicateRequest         the request id is in use
+-- Unauthenticated              no API key, or an unknown one
+-- Overloaded                   no room now; try again later
+-- WorkerUnavailable            a worker died, drained or could not be reached
+-- DeadlineExceeded             the request's time is up
+-- RequestCancelled             the client, or an abort, ended it
+-- HandoffFailed                KV could not be handed over
|   +-- IncompatiblePeer         the two workers do not hold the same model or KV layout
|   +-- TicketRefused            an offer or a ticket is forged, expired, used before, or meant for another
+-- TransportError               bytes could not be moved
|   +-- LinkClosed               the link was closed, by us or because the peer died
|   +-- LinkTooSlow              the link is slower than transfer.min_gbps, and transfer.strict refuses it
+-- StoreError                   a prefix store's memory or directory cannot be used
|   +-- DirectoryInUse           another process holds it; names its id
|   +-- ForeignDirectory         it holds blocks of another model, size or version
+-- ForeignCall                  a call to a worker does not carry this cluster's code
+-- ConfigError                  a configuration value is wrong
+-- ModelLoadError               weights, tokenizer or model config cannot be used
+-- ClusterError                 processes could not be started or stopped
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


class TandemError(Exception):
    """Base of all errors that Tandem raises on purpose. `code` is its stable name on the wire."""

    code: ClassVar[str] = "internal"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class RequestError(TandemError):
    code = "invalid_request"


class InvalidRequest(RequestError):
    code = "invalid_request"


class ContextLengthExceeded(RequestError):
    code = "context_length_exceeded"


class ModelNotFound(RequestError):
    code = "model_not_found"


class RequestNotFound(RequestError):
    code = "request_not_found"


class DuplicateRequest(RequestError):
    code = "duplicate_request"


class Unauthenticated(TandemError):
    code = "invalid_api_key"


class Overloaded(TandemError):
    code = "overloaded"


class WorkerUnavailable(TandemError):
    code = "worker_unavailable"


class DeadlineExceeded(TandemError):
    code = "deadline_exceeded"


class RequestCancelled(TandemError):
    code = "cancelled"


class HandoffFailed(TandemError):
    code = "handoff_failed"


class IncompatiblePeer(HandoffFailed):
    code = "incompatible_peer"


class TicketRefused(HandoffFailed):
    code = "ticket_refused"


class TransportError(TandemError):
    code = "transport_error"


class LinkClosed(TransportError):
    code = "link_closed"


class LinkTooSlow(TransportError):
    code = "link_too_slow"


class StoreError(TandemError):
    code = "store_error"


class DirectoryInUse(StoreError):
    code = "directory_in_use"


class ForeignDirectory(StoreError):
    code = "foreign_directory"


class ForeignCall(TandemError):
    code = "foreign_call"


class ConfigError(TandemError):
    code = "config_error"


class ModelLoadError(TandemError):
    code = "model_load_error"


class ClusterError(TandemError):
    code = "cluster_error"


@dataclass(frozen=True, kw_only=True, slots=True)
class WireStatus:
    """How an error looks from outside: gRPC status name, HTTP status, OpenAI error type, whether a retry may help."""

    grpc: str
    http: int
    openai_type: str
    retryable: bool


_INTERNAL = WireStatus(grpc="INTERNAL", http=500, openai_type="server_error", retryable=False)
_UNAVAILABLE = WireStatus(grpc="UNAVAILABLE", http=503, openai_type="server_error", retryable=True)
_INVALID = WireStatus(grpc="INVALID_ARGUMENT", http=400, openai_type="invalid_request_error", retryable=False)
_MISSING = WireStatus(grpc="NOT_FOUND", http=404, openai_type="invalid_request_error", retryable=False)

WIRE_STATUS: dict[type[TandemError], WireStatus] = {
    TandemError: _INTERNAL,
    RequestError: _INVALID,
    InvalidRequest: _INVALID,
    ContextLengthExceeded: _INVALID,
    ModelNotFound: _MISSING,
    RequestNotFound: _MISSING,
    DuplicateRequest: WireStatus(grpc="ALREADY_EXISTS", http=409, openai_type="invalid_request_error", retryable=False),
    Unauthenticated: WireStatus(grpc="UNAUTHENTICATED", http=401, openai_type="invalid_request_error", retryable=False),
    Overloaded: WireStatus(grpc="RESOURCE_EXHAUSTED", http=429, openai_type="rate_limit_error", retryable=True),
    WorkerUnavailable: _UNAVAILABLE,
    DeadlineExceeded: WireStatus(grpc="DEADLINE_EXCEEDED", http=504, openai_type="timeout_error", retryable=True),
    RequestCancelled: WireStatus(grpc="CANCELLED", http=499, openai_type="server_error", retryable=False),
    HandoffFailed: _UNAVAILABLE,
    IncompatiblePeer: WireStatus(grpc="FAILED_PRECONDITION", http=500, openai_type="server_error", retryable=False),
    TicketRefused: WireStatus(grpc="PERMISSION_DENIED", http=500, openai_type="server_error", retryable=False),
    TransportError: _UNAVAILABLE,
    LinkClosed: _UNAVAILABLE,
    LinkTooSlow: _UNAVAILABLE,
    StoreError: _INTERNAL,
    DirectoryInUse: _INTERNAL,
    ForeignDirectory: _INTERNAL,
    ForeignCall: WireStatus(grpc="UNAUTHENTICATED", http=500, openai_type="server_error", retryable=False),
    ConfigError: _INTERNAL,
    ModelLoadError: _INTERNAL,
    ClusterError: _INTERNAL,
}

BY_CODE: dict[str, type[TandemError]] = {cls.code: cls for cls in WIRE_STATUS}


def wire_status(error: TandemError) -> WireStatus:
    """The row of the table for `error`."""
    return WIRE_STATUS[type(error)]
