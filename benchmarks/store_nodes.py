"""Two nodes of a cluster as processes, each with a prefix store and a prefill worker, and a clock at the caller.

What a prompt costs is asked from a worker itself: from the call to its first token, with nothing to hand over. No
router and no Ray is between.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
import uuid
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from cluster.embedded_redis import EmbeddedRedis
from cluster.store_actor import store_settings
from cluster.store_process import StoreProcess
from router.naming import PromptNames
from tandem.config import ClusterConfig, to_mapping
from tandem.prefix_store.client import StoreClient
from tandem.prefix_store.client_session import ClientIdentity
from tandem.prefix_store.registry import StoreRegistry
from tandem.registry import Registry, WorkerRecord
from tandem.rpc.channels import Channels
from tandem.rpc.convert import prefill_request_to_proto
from tandem.rpc.tandem.v1 import worker_pb2_grpc
from tandem.secret import ClusterKey
from tandem.types import PromptPrefix, Request, RequestId, SamplingParams, WorkerId

_PATIENCE_S = 120.0


def _worker(channel: Connection, settings: dict[str, Any]) -> None:
    from prefill_pool.actor import PrefillActor

    actor = PrefillActor(settings)
    actor.ready()
    channel.send("ready")
    channel.recv()
    actor.stop()


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """One prompt: seconds to its first token, and tokens that were not computed."""

    ttft_s: float
    num_cached: int
    token_id: int


@dataclass(kw_only=True, slots=True)
class Nodes:
    """Open it with `async with`. `names` are the nodes'; each has a directory of its own below `disk`."""

    config: ClusterConfig
    names: Sequence[str]
    disk: Path
    key: ClusterKey
    _ends: AsyncExitStack = field(default_factory=AsyncExitStack)
    _redis: EmbeddedRedis = field(default_factory=EmbeddedRedis)
    _stores: dict[str, StoreProcess] = field(default_factory=dict)
    _clients: dict[str, StoreClient] = field(default_factory=dict)
    _workers: dict[str, WorkerRecord] = field(default_factory=dict)
    _channels: Channels | None = None

    async def __aenter__(self) -> Nodes:
        try:
            await self._start()
        except BaseException:
            await self._ends.aclose()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._ends.aclose()

    async def _start(self) -> None:
        await self._redis.start()
        self._ends.callback(self._redis.stop)
        for name in self.names:
            await self._start_store(name)
        await self._start_workers()
        self._channels = Channels(self.key)
        self._ends.push_async_callback(self._channels.close)
        registry = StoreRegistry(self._redis.url, cluster=self.config.cluster, ttl_s=5.0)
        self._ends.push_async_callback(registry.close)
        for name in self.names:
            record = await registry.get(name)
            assert record is not None
            identity = ClientIdentity(
                worker_id=WorkerId("benchmark"),
                fingerprint=record.fingerprint,
                block_bytes=record.block_bytes,
                num_layers=1,
            )
            client = await StoreClient.attach(registry.locate(name), key=self.key, identity=identity)
            self._ends.push_async_callback(client.close)
            self._clients[name] = client

    async def _start_store(self, name: str) -> None:
        prefix_store = replace(self.config.prefix_store, disk_path=str(self.disk / name))
        config = replace(self.config, prefix_store=prefix_store)
        settings = store_settings(config, redis_url=self._redis.url, node=name, host="127.0.0.1")
        store = StoreProcess(settings, log=None)
        await store.start()
        self._stores[name] = store
        self._ends.push_async_callback(store.stop, timeout_s=20.0)

    async def _start_workers(self) -> None:
        context = multiprocessing.get_context("spawn")
        cores = sorted(os.sched_getaffinity(0))
        channels = []
        for index, name in enumerate(self.names):
            settings = {
                "config": to_mapping(self.config),
                "worker_id": f"prefill-{index}",
                "redis_url": self._redis.url,
                "host": "127.0.0.1",
                "cores": (cores[-1 - index % len(cores)],),
                "store_node": name,
            }
            channel, remote = context.Pipe()
            process = context.Process(target=_worker, args=(remote, settings))
            process.start()
            remote.close()
            self._ends.callback(process.join)
            self._ends.callback(channel.send, "stop")
            channels.append(channel)
        for channel in channels:
            await asyncio.to_thread(channel.recv)
        registry = Registry(self._redis.url, cluster=self.config.cluster, ttl_s=5.0)
        records = {record.worker_id: record for record in await registry.workers()}
        await registry.close()
        self._workers = {name: records[WorkerId(f"prefill-{i}")] for i, name in enumerate(self.names)}

    def prefix_of(self, prompt: Sequence[int]) -> PromptPrefix:
        """What the prompt's blocks are called."""
        record = self._workers[self.names[0]]
        return PromptNames(prompt, salt="").of(record.fingerprint, record.block_size)

    async def ask(self, node: str, prompt: Sequence[int], *, cached: bool = True) -> Asked:
        """The prompt's first token from the node's worker. Without `cached` nothing is looked for or kept."""
        assert self._channels is not None
        now = time.monotonic()
        request = Request(
            request_id=RequestId(uuid.uuid4().hex),
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=1, temperature=0.0),
            arrival_s=now,
            deadline_s=now + 300.0,
            prefix=self.prefix_of(prompt) if cached else None,
        )
        stub = worker_pb2_grpc.PrefillWorkerStub(self._channels.get(self._workers[node].address))
        message = prefill_request_to_proto(request, now=now, handoff=None)
        started_s = time.perf_counter()
        ttft_s, token_id, num_cached = 0.0, -1, 0
        async for event in stub.Prefill(message):
            if event.WhichOneof("event") == "first_token":
                ttft_s, token_id = time.perf_counter() - started_s, event.first_token.token_id
            elif event.WhichOneof("event") == "done":
                num_cached = event.done.timings.num_cached_tokens
        return Asked(ttft_s=ttft_s, num_cached=num_cached, token_id=token_id)

    async def until_held(self, node: str, prompt: Sequence[int], tier: str) -> None:
        """Waits until the node's store can give the whole prompt from `tier`: "host", "disk" or "remote"."""
        names = self.prefix_of(prompt).blocks
        async with asyncio.timeout(_PATIENCE_S):
            while True:
                found = await self._clients[node].lookup(names)
                if getattr(found, f"num_{tier}") >= len(names) - 1:
                    return
                await asyncio.sleep(0.02)

    async def until_on_disk(self, node: str) -> None:
        """Waits until nothing more goes to disk."""
        seen = -1
        async with asyncio.timeout(_PATIENCE_S):
            while True:
                stats = await self._clients[node].stats()
                now = 0 if stats is None else sum(t.num_blocks for t in stats.tiers if t.tier == "disk")
                if now == seen and now:
                    return
                seen = now
                await asyncio.sleep(1.0)

    async def kill_store(self, node: str) -> None:
        """kill -9, and a successor with what is on disk; returns when the worker and this process are attached."""
        pid = self._stores[node].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        client = self._clients[node]
        await self._stores[node].stop(timeout_s=1.0)
        await self._start_store(node)
        async with asyncio.timeout(_PATIENCE_S):
            while True:
                stats = await client.stats()
                if stats is not None and stats.num_clients >= 2:
                    return
                await asyncio.sleep(0.05)
