"""One gRPC channel per peer address, opened with the first use, the least recently used closed past a bound."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

import grpc

from tandem.rpc.client import open_channel

MAX_CHANNELS = 1024


class Channels:
    """Event loop only. Workers that restart get a new address, so old channels fall out by themselves."""

    def __init__(self, max_channels: int = MAX_CHANNELS) -> None:
        self._channels: OrderedDict[str, grpc.aio.Channel] = OrderedDict()
        self._max_channels = max_channels
        self._closing: set[asyncio.Task[None]] = set()

    def get(self, address: str) -> grpc.aio.Channel:
        """The channel to host:port."""
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = open_channel(address)
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
