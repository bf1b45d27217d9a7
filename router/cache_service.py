"""The cache's part of tandem.v1.Admin: translates; `cache_admin.py` does the work."""

from __future__ import annotations

from typing import Any

import grpc

from router.cache_admin import CacheAdmin, WantedPrefix, block_name
from router.frontend import Frontend
from router.validation import SamplingOptions, check_options
from tandem.errors import InvalidRequest, WorkerUnavailable
from tandem.rpc.status import typed_errors
from tandem.rpc.tandem.v1 import inference_pb2, inference_pb2_grpc

_Context = grpc.aio.ServicerContext[Any, Any]


class CacheService(inference_pb2_grpc.AdminServicer):
    """Without a `cache` every call is refused."""

    def __init__(self, frontend: Frontend, cache: CacheAdmin | None) -> None:
        self._frontend = frontend
        self._cache = cache

    def _caches(self) -> CacheAdmin:
        if self._cache is None:
            raise WorkerUnavailable("this router has no caches to administer")
        return self._cache

    async def GetCacheStats(
        self, request: inference_pb2.GetCacheStatsRequest, context: _Context
    ) -> inference_pb2.CacheStats:
        """See the proto."""
        async with typed_errors(context):
            return await self._caches().stats()

    async def ListCachedPrefixes(
        self, request: inference_pb2.ListCachedPrefixesRequest, context: _Context
    ) -> inference_pb2.CachedPrefixes:
        """See the proto."""
        async with typed_errors(context):
            return await self._caches().hottest(request.limit)

    async def PinPrefix(
        self, request: inference_pb2.PrefixSelector, context: _Context
    ) -> inference_pb2.PrefixAnswer:
        """See the proto."""
        async with typed_errors(context):
            return await self._caches().pin(await self._prefix(request))

    async def UnpinPrefix(
        self, request: inference_pb2.PrefixSelector, context: _Context
    ) -> inference_pb2.PrefixAnswer:
        """See the proto."""
        async with typed_errors(context):
            return await self._caches().unpin(await self._prefix(request))

    async def ClearCache(
        self, request: inference_pb2.ClearCacheRequest, context: _Context
    ) -> inference_pb2.ClearCacheAnswer:
        """See the proto."""
        async with typed_errors(context):
            return await self._caches().clear()

    async def VerifyCache(
        self, request: inference_pb2.VerifyCacheRequest, context: _Context
    ) -> inference_pb2.VerifyCacheAnswer:
        """See the proto."""
        async with typed_errors(context):
            return await self._caches().verify()

    async def _prefix(self, request: inference_pb2.PrefixSelector) -> WantedPrefix:
        which = request.WhichOneof("prefix")
        if which is None:
            raise InvalidRequest("name a prefix: text, token_ids or block", param="prefix")
        if which == "block":
            if request.cache_salt:
                raise InvalidRequest("cache_salt does not go with a block: its name has it", param="cache_salt")
            return WantedPrefix(block=block_name(request.block))
        options = SamplingOptions(cache_salt=request.cache_salt)
        check_options(options, vocab_size=self._frontend.tokenizer.vocab_size)
        prompt = request.text if which == "text" else tuple(request.token_ids.ids)
        token_ids = await self._frontend.prompt_tokens(prompt)
        return WantedPrefix(token_ids=tuple(token_ids), salt=request.cache_salt)
