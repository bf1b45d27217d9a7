"""Calls between processes of one cluster carry a code made with its key; a worker refuses every other call.

The code covers the method, the address that was dialled, an expiry and a nonce, so one that was overheard is good for
nothing else, nowhere else, and not a second time. It does not cover the message: against a changed one, and against
readers, there is TLS. Health and reflection stay open, for probes and people.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

import grpc
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from tandem.errors import ForeignCall
from tandem.rpc.status import abort
from tandem.secret import ClusterKey, ReplayGuard, same

AUTH_KEY = "tandem-auth"
LIFETIME_S = 30.0
"""From making a code to using it: a call waits that long for a connection, and clocks differ by some of it."""
_PURPOSE = "worker-call"
_OPEN_SERVICES = frozenset({health.SERVICE_NAME, reflection.SERVICE_NAME})

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]"


def call_code(key: ClusterKey, *, method: str, address: str, now: float) -> str:
    """The metadata value of one call. `method` is "/package.Service/Method", `now` wall clock in seconds."""
    expiry, nonce = str(round((now + LIFETIME_S) * 1000)), secrets.token_hex(16)
    return f"{expiry}.{nonce}.{_mac(key, method, address, expiry, nonce)}"


def _mac(key: ClusterKey, *claims: str) -> str:
    return key.mac(_PURPOSE, [claim.encode() for claim in claims]).hex()


class CallGuard(grpc.aio.ServerInterceptor):
    """A server's interceptor. `address` is set when the server is bound; calls before that are refused."""

    def __init__(self, key: ClusterKey, *, clock: Callable[[], float] = time.time) -> None:
        self.address = ""
        self._key = key
        self._clock = clock
        self._used = ReplayGuard()

    async def intercept_service(self, continuation: Continuation, details: grpc.HandlerCallDetails) -> Handler | None:
        """Passes the call on, or answers it with UNAUTHENTICATED."""
        handler = await continuation(details)
        service = details.method.split("/")[1]
        if handler is None or service in _OPEN_SERVICES:
            return handler
        metadata: Mapping[str, Any] = dict(details.invocation_metadata or ())
        try:
            self.check(details.method, str(metadata.get(AUTH_KEY, "")))
        except ForeignCall as error:
            return _refusal(handler, error)
        return handler

    def check(self, method: str, code: str) -> None:
        """Uses a code up. Raises ForeignCall."""
        now = self._clock()
        if not code:
            raise ForeignCall(f"a call of {method} without this cluster's code")
        expiry, _, rest = code.partition(".")
        nonce, _, mac = rest.partition(".")
        if not same(_mac(self._key, method, self.address, expiry, nonce).encode(), mac.encode()):
            raise ForeignCall(f"a call of {method} with a code of another cluster, or not for {self.address}")
        expires_s = int(expiry) / 1000
        if not now - LIFETIME_S < expires_s <= now + 2 * LIFETIME_S:
            age_s = now - expires_s
            raise ForeignCall(f"a call of {method} whose code expired {age_s:.1f} s ago; do the clocks agree?")
        if not self._used.use(nonce.encode(), expires_s=expires_s + LIFETIME_S, now=now):
            raise ForeignCall(f"a call of {method} with a code that was used before")


def _refusal(handler: Handler, error: ForeignCall) -> Handler:
    """A handler of the same shape that only refuses."""

    async def refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await abort(context, error)

    async def refuse_stream(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        await abort(context, error)
        yield  # makes it a generator, as gRPC expects of a handler that streams

    shapes: dict[tuple[bool, bool], Callable[..., Handler]] = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    make = shapes[handler.request_streaming, handler.response_streaming]
    body = refuse_stream if handler.response_streaming else refuse
    return make(body, handler.request_deserializer, handler.response_serializer)


class SignedChannel(grpc.aio.Channel):
    """A channel to a worker: adds the code to each call, and is otherwise the channel that it is given."""

    def __init__(self, channel: grpc.aio.Channel, *, key: ClusterKey, address: str) -> None:
        self._channel = channel
        self._key = key
        self._address = address

    async def __aenter__(self) -> SignedChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """Closes the channel; calls on it are cancelled after `grace` seconds."""
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """See `grpc.aio.Channel`."""
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """See `grpc.aio.Channel`."""
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """See `grpc.aio.Channel`."""
        await self._channel.channel_ready()

    def unary_unary(self, method: str, *arguments: Any, **named: Any) -> Any:
        """See `grpc.aio.Channel`, as the next three."""
        return self._signed(method, self._channel.unary_unary(method, *arguments, **named))

    def unary_stream(self, method: str, *arguments: Any, **named: Any) -> Any:
        return self._signed(method, self._channel.unary_stream(method, *arguments, **named))

    def stream_unary(self, method: str, *arguments: Any, **named: Any) -> Any:
        return self._signed(method, self._channel.stream_unary(method, *arguments, **named))

    def stream_stream(self, method: str, *arguments: Any, **named: Any) -> Any:
        return self._signed(method, self._channel.stream_stream(method, *arguments, **named))

    def _signed(self, method: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def signed(*arguments: Any, metadata: Sequence[tuple[str, str]] = (), **named: Any) -> Any:
            code = call_code(self._key, method=method, address=self._address, now=time.time())
            return call(*arguments, metadata=(*metadata, (AUTH_KEY, code)), **named)

        return signed
