"""API keys at the router's two doors: an interceptor for gRPC, a layer for HTTP. Which keys is `api_keys.py`'s.

Health checks, reflection and metrics stay open: they tell nothing of requests, and probes have no keys.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Never

import grpc
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from router.api_keys import ApiKeys
from router.openai_format import error_body
from tandem.errors import TandemError, Unauthenticated, wire_status
from tandem.rpc.status import abort

OPEN_SERVICES = ("/grpc.health.v1.Health/", "/grpc.reflection.v1alpha.ServerReflection/")
OPEN_PATHS = ("/health", "/ping", "/metrics")
HEADER = "authorization"

if TYPE_CHECKING:
    _Handler = grpc.RpcMethodHandler[Any, Any]
    _Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]]


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without a key before their handler sees them."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def intercept_service(
        self, continuation: _Continuation, details: grpc.HandlerCallDetails
    ) -> _Handler | None:
        """See gRPC."""
        handler = await continuation(details)
        if handler is None or str(details.method).startswith(OPEN_SERVICES):
            return handler
        metadata = {str(key): value for key, value in details.invocation_metadata or ()}
        given = metadata.get(HEADER)
        try:
            self._keys.check(given if isinstance(given, str) else None)
        except Unauthenticated as exc:
            return _refusal(handler, exc)
        return handler


def _refusal(handler: _Handler, error: TandemError) -> _Handler:
    """A handler of the same kind as far as the request goes, that ends the call with `error`."""

    async def refuse(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Never:
        await abort(context, error)

    if handler.request_streaming:
        return grpc.stream_stream_rpc_method_handler(refuse)
    return grpc.unary_unary_rpc_method_handler(refuse)


class KeyLayer:
    """Refuses HTTP requests without a key with OpenAI's error body."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                self._keys.check(Headers(scope=scope).get(HEADER))
            except Unauthenticated as exc:
                headers = {"www-authenticate": "Bearer"}
                refusal = JSONResponse(error_body(exc), status_code=wire_status(exc).http, headers=headers)
                return await refusal(scope, receive, send)
        return await self._app(scope, receive, send)
