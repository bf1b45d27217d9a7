"""What `tandem cache` asks of a router. Raises TandemError, as `client.py` does."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

import grpc

from cluster.access import Access
from cluster.client import as_tandem_error
from tandem.rpc.client import open_channel
from tandem.rpc.tandem.v1 import inference_pb2, inference_pb2_grpc

R = TypeVar("R")

_SHORT_S = 15.0
_CLEAR_S = 150.0


class CacheClient:
    """A connection to one router; an async context manager."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._metadata = access.metadata()

    async def __aenter__(self) -> CacheClient:
        access = self._access
        self._channel = open_channel(access.endpoint, access.credentials(), server_name=access.tls_server_name)
        self._admin = inference_pb2_grpc.AdminStub(self._channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def _answer(self, call: Awaitable[R]) -> R:
        try:
            return await call
        except grpc.aio.AioRpcError as exc:
            raise as_tandem_error(exc, self._access.endpoint) from exc

    async def stats(self) -> inference_pb2.CacheStats:
        """Every worker's and every node's counts."""
        request = inference_pb2.GetCacheStatsRequest()
        return await self._answer(self._admin.GetCacheStats(request, timeout=_SHORT_S, metadata=self._metadata))

    async def hottest(self, limit: int) -> inference_pb2.CachedPrefixes:
        """The most used prefixes."""
        request = inference_pb2.ListCachedPrefixesRequest(limit=limit)
        return await self._answer(self._admin.ListCachedPrefixes(request, timeout=_SHORT_S, metadata=self._metadata))

    async def pin(self, prefix: inference_pb2.PrefixSelector) -> inference_pb2.PrefixAnswer:
        """Keeps a prefix."""
        return await self._answer(self._admin.PinPrefix(prefix, timeout=_SHORT_S, metadata=self._metadata))

    async def unpin(self, prefix: inference_pb2.PrefixSelector) -> inference_pb2.PrefixAnswer:
        """Takes a pin away."""
        return await self._answer(self._admin.UnpinPrefix(prefix, timeout=_SHORT_S, metadata=self._metadata))

    async def clear(self) -> inference_pb2.ClearCacheAnswer:
        """Forgets what is neither pinned nor in use."""
        request = inference_pb2.ClearCacheRequest()
        return await self._answer(self._admin.ClearCache(request, timeout=_CLEAR_S, metadata=self._metadata))

    async def verify(self, *, timeout_s: float) -> inference_pb2.VerifyCacheAnswer:
        """Has all of it read again."""
        request = inference_pb2.VerifyCacheRequest()
        return await self._answer(self._admin.VerifyCache(request, timeout=timeout_s, metadata=self._metadata))
