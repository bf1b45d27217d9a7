"""Channels to workers and routers: message sizes, keepalive that notices a dead host, quick reconnects, no proxies."""

from __future__ import annotations

import grpc

MAX_MESSAGE_BYTES = 64 * 1024 * 1024

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # what ends a call to a peer that stands still
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_http_proxy", 0),
)


def open_channel(
    address: str, credentials: grpc.ChannelCredentials | None = None, *, server_name: str = ""
) -> grpc.aio.Channel:
    """A lazy channel to `address` (host:port). It connects with the first call; close it when done.

    Without `credentials` it is not encrypted. `server_name` is the one in the peer's certificate, where it is another.
    """
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    name = (("grpc.ssl_target_name_override", server_name),) if server_name else ()
    return grpc.aio.secure_channel(address, credentials, options=(*CHANNEL_OPTIONS, *name))
