"""What operators ask of all that is cached: each worker's own blocks, and each node's prefix store.

Asks every one of them, at the same time; one that does not answer is named in the answer and hides no other. What a
prefix is called is `naming.py`'s.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from redis.exceptions import RedisError

from router.cache_reports import NO_STORES, NOT_KEPT, NamedBlock, merged, node_cache, worker_cache
from router.naming import PromptNames
from router.tracker import WorkerTracker
from tandem.errors import InvalidRequest, RequestNotFound, TandemError, WorkerUnavailable
from tandem.kv.hashing import HASH_BYTES
from tandem.prefix_store.names import pack_names
from tandem.prefix_store.registry import StoreRecord, StoreRegistry
from tandem.registry import WorkerRecord
from tandem.rpc.status import from_rpc_error
from tandem.rpc.tandem.v1 import inference_pb2, store_pb2, store_pb2_grpc, worker_pb2, worker_pb2_grpc

R = TypeVar("R")

MAX_LISTED = 1000
DEFAULT_LISTED = 20
_SHORT_S = 5.0
_CLEAR_S = 60.0
_VERIFY_S = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """What one store or worker said, or why it said nothing."""

    of: Any
    answer: Any = None
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class WantedPrefix:
    """A prompt's token ids and salt, or the name of a block that ends the prefix."""

    token_ids: tuple[int, ...] = ()
    salt: str = ""
    block: bytes = b""


def block_name(text: str) -> bytes:
    """From its hex digits. Raises InvalidRequest."""
    try:
        name = bytes.fromhex(text)
    except ValueError as exc:
        raise InvalidRequest(f"a block's name is {2 * HASH_BYTES} hex digits, got {text!r}", param="block") from exc
    if len(name) != HASH_BYTES:
        raise InvalidRequest(f"a block's name is {2 * HASH_BYTES} hex digits, got {len(text)}", param="block")
    return name


def tenant_digest(salt: str) -> str:
    """What is shown of a salt: whoever knows it recognises it, nobody else learns it."""
    return hashlib.blake2b(salt.encode(), digest_size=8).hexdigest() if salt else ""


class CacheAdmin:
    """Event loop only. Methods raise WorkerUnavailable while Redis is away: who has a store is not known then."""

    def __init__(self, stores: StoreRegistry, tracker: WorkerTracker, *, is_enabled: bool, has_stores: bool) -> None:
        """`is_enabled` and `has_stores` are what the configuration says."""
        self._stores = stores
        self._tracker = tracker
        self._is_enabled = is_enabled
        self._has_stores = has_stores

    async def stats(self) -> inference_pb2.CacheStats:
        """Everybody's counts now."""
        request = store_pb2.StoreStatsRequest()
        records = await self._records()
        answers, statuses = await asyncio.gather(
            self._ask(records, lambda stub: stub.GetStats(request, timeout=_SHORT_S)), self._tracker.statuses()
        )
        return inference_pb2.CacheStats(
            nodes=[node_cache(one.of.node, one.answer, error=one.error) for one in answers],
            workers=[worker_cache(status) for status in statuses],
            has_stores=self._has_stores or bool(records),
            is_enabled=self._is_enabled,
        )

    async def hottest(self, limit: int) -> inference_pb2.CachedPrefixes:
        """The most used prefixes of all nodes. Raises InvalidRequest."""
        if limit > MAX_LISTED:
            raise InvalidRequest(f"limit must be 1 to {MAX_LISTED}, got {limit}", param="limit")
        limit = limit or DEFAULT_LISTED
        request = store_pb2.StoreListRequest(limit=limit)
        answers = await self._ask(await self._wanted(), lambda stub: stub.List(request, timeout=_SHORT_S))
        sizes = {record.fingerprint: record.block_size for record in self._tracker.records()}
        found = [
            NamedBlock(node=one.of.node, block=block, block_size=sizes.get(one.of.fingerprint, 0))
            for one in answers
            if not one.error
            for block in one.answer.blocks
        ]
        return inference_pb2.CachedPrefixes(
            prefixes=merged(found, limit=limit, tenant=tenant_digest),
            failures=[inference_pb2.NodeAnswer(node=one.of.node, error=one.error) for one in answers if one.error],
        )

    async def pin(self, prefix: WantedPrefix) -> inference_pb2.PrefixAnswer:
        """Keeps what there is of it. Raises RequestNotFound where there is nothing, InvalidRequest."""
        answer = await self._on_prefix(prefix, lambda stub, message: stub.Pin(message, timeout=_SHORT_S))
        _require_some(answer, "no node's store has the first block of this prefix")
        return answer

    async def unpin(self, prefix: WantedPrefix) -> inference_pb2.PrefixAnswer:
        """Takes one pin away from each block of it. Raises RequestNotFound where none has one, InvalidRequest."""
        answer = await self._on_prefix(prefix, lambda stub, message: stub.Unpin(message, timeout=_SHORT_S))
        _require_some(answer, "no node's store has pinned a block of this prefix")
        return answer

    async def clear(self) -> inference_pb2.ClearCacheAnswer:
        """Workers first: what they have would be written to the stores again."""
        stores = await self._records()
        workers = await _gather(self._tracker.records(), self._clear_worker)
        request = store_pb2.StoreClearRequest()
        nodes = await self._ask(stores, lambda stub: stub.Clear(request, timeout=_CLEAR_S))
        return inference_pb2.ClearCacheAnswer(
            nodes=[_node_answer(one) for one in nodes],
            workers=[
                inference_pb2.WorkerAnswer(
                    worker_id=one.of.worker_id, num_blocks=one.answer.num_blocks if one.answer else 0, error=one.error
                )
                for one in workers
            ],
        )

    async def verify(self) -> inference_pb2.VerifyCacheAnswer:
        """Reads everything again."""
        request = store_pb2.StoreVerifyRequest()
        answers = await self._ask(await self._wanted(), lambda stub: stub.Verify(request, timeout=_VERIFY_S))
        return inference_pb2.VerifyCacheAnswer(
            nodes=[
                inference_pb2.NodeVerified(
                    node=one.of.node,
                    num_checked=one.answer.num_checked if one.answer else 0,
                    num_damaged=one.answer.num_damaged if one.answer else 0,
                    error=one.error,
                )
                for one in answers
            ]
        )

    # --- prefixes

    async def _on_prefix(
        self, prefix: WantedPrefix, call: Callable[[Any, store_pb2.StorePrefix], Awaitable[Any]]
    ) -> inference_pb2.PrefixAnswer:
        records = await self._wanted()
        message, num_blocks = store_pb2.StorePrefix(last=prefix.block), 0
        if prefix.block:
            answers = await self._ask(records, lambda stub: call(stub, message))
        else:
            messages = self._named(prefix)
            num_blocks = max(len(message.names) // HASH_BYTES for message in messages.values())
            ours = [record for record in records if record.fingerprint in messages]
            answers = await _gather(
                ours, lambda record: call(self._stub(record), messages[record.fingerprint])
            )
        return inference_pb2.PrefixAnswer(nodes=[_node_answer(one) for one in answers], num_blocks=num_blocks)

    def _named(self, prefix: WantedPrefix) -> dict[str, store_pb2.StorePrefix]:
        """The prompt's blocks as the workers of each fingerprint call them. Raises InvalidRequest."""
        names, found, count = PromptNames(prefix.token_ids, salt=prefix.salt), {}, len(prefix.token_ids)
        for worker in self._tracker.view().workers:
            blocks = names.of(worker.fingerprint, worker.block_size).blocks
            if not blocks:
                raise InvalidRequest(
                    f"the prompt has {count} token{'s' * (count != 1)}, less than a block of {worker.block_size}: "
                    "nothing of it is kept",
                    param="text",
                )
            found[worker.fingerprint] = store_pb2.StorePrefix(names=pack_names(blocks))
        if not found:
            raise WorkerUnavailable("no worker is ready yet; try again shortly", retry_after_s=1.0)
        return found

    # --- who is asked

    async def _records(self) -> Sequence[StoreRecord]:
        try:
            return await self._stores.stores()
        except RedisError as exc:
            raise WorkerUnavailable(
                f"Redis is away, the nodes' prefix stores are not known now: {exc}", retry_after_s=1.0
            ) from exc

    async def _wanted(self) -> Sequence[StoreRecord]:
        """The stores. Raises InvalidRequest where there are to be none, WorkerUnavailable where there are none yet."""
        records = await self._records()
        if not records and not self._has_stores:
            raise InvalidRequest(NO_STORES if self._is_enabled else NOT_KEPT)
        if not records:
            raise WorkerUnavailable("no prefix store is there yet; try again shortly", retry_after_s=1.0)
        return records

    def _stub(self, record: StoreRecord) -> store_pb2_grpc.PrefixStoreAsyncStub:
        return store_pb2_grpc.PrefixStoreStub(self._tracker.channels.get(record.address))

    async def _ask(
        self, records: Sequence[StoreRecord], call: Callable[[Any], Awaitable[Any]]
    ) -> list[Answered]:
        return await _gather(records, lambda record: call(self._stub(record)))

    async def _clear_worker(self, record: WorkerRecord) -> worker_pb2.ClearDeviceTierResponse:
        stub = worker_pb2_grpc.WorkerStub(self._tracker.channels.get(record.address))
        return await stub.ClearDeviceTier(worker_pb2.ClearDeviceTierRequest(), timeout=_CLEAR_S)


async def _gather(records: Sequence[R], call: Callable[[R], Awaitable[Any]]) -> list[Answered]:
    async def one(record: R) -> Answered:
        try:
            return Answered(of=record, answer=await call(record))
        except grpc.aio.AioRpcError as exc:
            return Answered(of=record, error=_reason(from_rpc_error(exc)))

    return list(await asyncio.gather(*(one(record) for record in records)))


def _reason(error: TandemError) -> str:
    return error.message or error.code


def _node_answer(one: Answered) -> inference_pb2.NodeAnswer:
    count = one.answer.count if one.answer is not None else 0
    return inference_pb2.NodeAnswer(node=one.of.node, num_blocks=count, error=one.error)


def _require_some(answer: inference_pb2.PrefixAnswer, otherwise: str) -> None:
    if not any(node.num_blocks or node.error for node in answer.nodes):
        raise RequestNotFound(otherwise, param="prefix")
