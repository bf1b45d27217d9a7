"""Channels to workers and routers: message sizes, keepalive that notices a dead host, quick reconnects, no proxies."""

from __future__ import annotations

import grpc

MAX_MESSAGE_BYTES = 64 * 1024 * 1024

SILENCE_S = 10.0
"""A peer that sends nothing for so long is asked; one that does not answer for as long again is given up."""


def _options(silence_s: float) -> tuple[tuple[str, int], ...]:
    silence_ms = int(1000 * silence_s)
    return (
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", silence_ms),
        ("grpc.keepalive_timeout_ms", silence_ms),
        ("grpc.http2.ping_timeout_ms", silence_ms),  # what ends a call to a peer that stands still
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.enable_http_proxy", 0),
    )


def open_channel(
    address: str,
    credentials: grpc.ChannelCredentials | None = None,
    *,
    server_name: str = "",
    silence_s: float = SILENCE_S,
) -> grpc.aio.Channel:
    """A lazy channel to `address` (host:port). It connects with the first call; close it when done.

    Without `credentials` it is not encrypted. `server_name` is the one in the peer's certificate, where it is another.
    Calls to a peer that stands still end as UNAVAILABLE after twice `silence_s`.
    """
    options = _options(silence_s)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    name = (("grpc.ssl_target_name_override", server_name),) if server_name else ()
    return grpc.aio.secure_channel(address, credentials, options=(*options, *name))
