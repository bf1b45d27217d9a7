"""One gRPC channel per peer address, opened with the first use, the least recently used closed past a bound."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

import grpc

from tandem.rpc.authentication import SignedChannel
from tandem.rpc.client import open_channel
from tandem.secret import ClusterKey

MAX_CHANNELS = 1024


class Channels:
    """Event loop only. Workers that restart get a new address, so old channels fall out by themselves.

    Calls on them carry the code of the cluster's key.
    """

    def __init__(self, key: ClusterKey, *, max_channels: int = MAX_CHANNELS) -> None:
        self._key = key
        self._channels: OrderedDict[str, grpc.aio.Channel] = OrderedDict()
        self._max_channels = max_channels
        self._closing: set[asyncio.Task[None]] = set()

    def get(self, address: str) -> grpc.aio.Channel:
        """The channel to host:port."""
        channel = self._channels.get(address)
        if channel is None:
            channel = SignedChannel(open_channel(address), key=self._key, address=address)
            self._channels[address] = channel
        self._channels.move_to_end(address)
        if len(self._channels) > self._max_channels:
            self.drop(next(iter(self._channels)))
        return channel

    def drop(self, address: str) -> None:
        """Closes the channel to a peer that is gone; calls on it are cancelled."""
        channel = self._channels.pop(address, None)
        if channel is not None:
            task = asyncio.ensure_future(channel.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Closes all channels."""
        for address in list(self._channels):
            self.drop(address)
        await asyncio.gather(*self._closing)
