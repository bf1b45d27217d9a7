"""The remote tier: fetches blocks from other nodes' stores into this node's host tier, over the transport.

A peer sends each block as one message, straight into the slot that was reserved for it; what does not carry the fetch's
code, comes late or is damaged is never taken. A peer that gives nothing, or damaged blocks, is left alone for a while.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import grpc
import torch

from kv_transfer.block_claims import FetchClaims, fetch_code
from kv_transfer.probe import ProbeSink
from kv_transfer.ticket import link_key
from kv_transfer.transport import MessageHeader, Transport
from tandem.errors import TransportError
from tandem.kv.prefix_index import PrefixIndex
from tandem.kv.tiering import best_peer
from tandem.prefix_store.names import pack_names
from tandem.prefix_store.registry import StoreRecord
from tandem.prefix_store.tier import Fetched
from tandem.rpc.channels import Channels
from tandem.rpc.status import from_rpc_error
from tandem.rpc.tandem.v1 import store_pb2, store_pb2_grpc
from tandem.secret import ClusterKey
from tandem.types import BlockHash, Epoch, HandoffId, WorkerId

logger = logging.getLogger(__name__)

AVOID_S = 10.0
"""How long such a peer is not asked again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreIdentity:
    """Who a store is to its peers."""

    owner: WorkerId
    epoch: Epoch
    fingerprint: str
    block_bytes: int


class _Incoming:
    """One fetch under way; `place` and `landed` on the transport's threads."""

    def __init__(self, destinations: Sequence[torch.Tensor], key: bytes, epoch: Epoch) -> None:
        self.num_damaged = 0
        self._destinations = destinations
        self._key = key
        self._epoch = epoch
        self._lock = threading.Lock()
        self._placed: set[int] = set()
        self._digests: dict[int, int] = {}
        self._num_over = 0
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()

    def place(self, header: MessageHeader) -> list[torch.Tensor] | None:
        index = header.first_block
        is_ours = header.is_sealed(self._key) and header.epoch == self._epoch and header.digest != 0
        if not is_ours or header.num_blocks != 1 or index >= len(self._destinations):
            return None
        with self._lock:
            if index in self._placed or header.num_bytes != self._destinations[index].numel():
                return None
            self._placed.add(index)
        return [self._destinations[index]]

    def landed(self, header: MessageHeader, error: TransportError | None) -> None:
        with self._lock:
            self._num_over += 1
            if error is None:
                self._digests[header.first_block] = header.digest
            else:
                self.num_damaged += 1
        self._loop.call_soon_threadsafe(self._changed.set)

    async def wait(self, num_blocks: int) -> None:
        """Until so many messages have come, whole or not."""
        while self._num_over < num_blocks:
            self._changed.clear()
            if self._num_over < num_blocks:
                await self._changed.wait()

    def leading(self) -> list[int]:
        """Digests of the leading blocks that are whole."""
        digests: list[int] = []
        while (digest := self._digests.get(len(digests))) is not None:
            digests.append(digest)
        return digests


class PeerTier:
    """A `RemoteTier`, and the transport's sink. Event loop only, but for the sink's methods."""

    def __init__(
        self, identity: StoreIdentity, *, transport: Transport, key: ClusterKey, index: PrefixIndex, channels: Channels
    ) -> None:
        self._identity = identity
        self._transport = transport
        self._key = key
        self._index = index
        self._channels = channels
        self._peers: dict[str, StoreRecord] = {}
        self._avoided: dict[str, float] = {}
        self._incoming: dict[HandoffId, _Incoming] = {}
        transport.serve(ProbeSink(self, transport))

    def set_peers(self, records: Iterable[StoreRecord]) -> list[str]:
        """The stores that there are now; the owners among them from which blocks can be had."""
        ours = self._identity
        kind = (ours.fingerprint, ours.block_bytes, self._transport.name)
        fitting = (r for r in records if (r.fingerprint, r.block_bytes, r.transport) == kind and r.owner != ours.owner)
        self._peers = {record.owner: record for record in fitting}
        return list(self._peers)

    def _best(self, names: Sequence[BlockHash], have: int) -> tuple[str, int] | None:
        now = time.monotonic()
        self._avoided = {owner: until_s for owner, until_s in self._avoided.items() if until_s > now}
        holders = self._index.match(names)
        usable = {owner: tiers for owner, tiers in holders.items() if owner in self._peers}
        return best_peer({o: tiers for o, tiers in usable.items() if o not in self._avoided}, have=have)

    def match(self, names: Sequence[BlockHash]) -> int:
        """How many leading names the best peer has."""
        best = self._best(names, 0)
        return 0 if best is None else best[1]

    async def fetch(
        self, names: Sequence[BlockHash], *, first: int, destinations: Sequence[torch.Tensor], timeout_s: float
    ) -> Fetched:
        """See `RemoteTier.fetch`."""
        best = self._best(names, first)
        if best is None:
            return Fetched(digests=[])
        owner, count = best
        peer = self._peers[owner]
        fetch = self._claims(peer, names[:count], first, timeout_s)
        key = link_key(self._key, fetch.claims())
        incoming = _Incoming(destinations[: count - first], key, self._identity.epoch)
        self._incoming[fetch.transfer_id] = incoming
        failure = "it was given up"
        try:
            failure = await self._ask(peer, fetch, incoming, timeout_s=timeout_s)
        finally:
            del self._incoming[fetch.transfer_id]
            if failure:
                if incoming.num_damaged or not incoming.leading():  # one that is only slow may go on where it was
                    self._avoided[owner] = time.monotonic() + AVOID_S
                logger.warning("fetching %d blocks from %s failed: %s", count - first, owner, failure)
            await asyncio.shield(asyncio.wrap_future(self._transport.quiesce(fetch.transfer_id)))
        return Fetched(digests=incoming.leading(), num_damaged=incoming.num_damaged)

    def _claims(self, peer: StoreRecord, names: Sequence[BlockHash], first: int, timeout_s: float) -> FetchClaims:
        return FetchClaims(
            transfer_id=HandoffId(uuid.uuid4().hex),
            source=WorkerId(peer.owner),
            source_epoch=Epoch(peer.epoch),
            destination=self._identity.owner,
            destination_epoch=self._identity.epoch,
            expires_s=time.time() + timeout_s,
            address=self._transport.address(),
            names=pack_names(names),
            first=first,
        )

    async def _ask(self, peer: StoreRecord, fetch: FetchClaims, incoming: _Incoming, *, timeout_s: float) -> str:
        """Has the peer send and waits for all of it; why that failed, "" if it did not."""
        stub = store_pb2_grpc.PrefixStorePeerStub(self._channels.get(peer.address))
        request = store_pb2.StoreFetchRequest(
            transfer_id=fetch.transfer_id,
            source=fetch.source,
            source_epoch=fetch.source_epoch,
            destination=fetch.destination,
            destination_epoch=fetch.destination_epoch,
            expires_s=fetch.expires_s,
            fingerprint=self._identity.fingerprint,
            block_bytes=self._identity.block_bytes,
            transport=self._transport.name,
            address=fetch.address,
            names=fetch.names,
            first=fetch.first,
            code=fetch_code(self._key, fetch),
        )
        try:
            async with asyncio.timeout(timeout_s):
                reply: store_pb2.StoreFetchReply = await stub.Fetch(request, timeout=timeout_s)
                await incoming.wait(reply.num_sent)
        except grpc.aio.AioRpcError as exc:
            return from_rpc_error(exc).message
        except TimeoutError:
            return f"not all of it was here after {timeout_s:g} s"
        return "" if len(incoming.leading()) >= reply.num_sent else "it came damaged"

    # --- sink

    def place(self, header: MessageHeader) -> Sequence[torch.Tensor] | None:
        """Messages of fetches that are over are refused."""
        incoming = self._incoming.get(header.handoff_id)
        return None if incoming is None else incoming.place(header)

    def landed(self, header: MessageHeader, error: TransportError | None) -> None:
        """After the end of its fetch nobody asks for a block."""
        incoming = self._incoming.get(header.handoff_id)
        if incoming is not None:
            incoming.landed(header, error)
