"""The event loop of a rank other than 0, on a thread of its own, and how its halves of handoffs speak to rank 0."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from tandem.errors import LinkClosed
from tandem.ranks.channel import Kind, RankChannel
from tandem.rpc.tandem.v1 import rank_pb2
from tandem.tasks import cancel_all
from tandem.types import HandoffId

logger = logging.getLogger(__name__)


class RankLoop:
    """Runs from its construction until `close`."""

    def __init__(self, channel: RankChannel, *, on_crash: Callable[[BaseException], None]) -> None:
        """`on_crash` hears of what a task raised, which is a bug of ours: the rank cannot be trusted any more."""
        self._channel = channel
        self._on_crash = on_crash
        self._tasks: set[asyncio.Task[None]] = set()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="rank-loop", daemon=True)
        self._thread.start()

    def soon(self, call: Callable[[], None]) -> None:
        """Calls on the loop, in order. Any thread; nothing happens once it is closed."""
        try:
            self.loop.call_soon_threadsafe(call)
        except RuntimeError:
            logger.debug("the rank's loop is closed")

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Starts a task; on the loop."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("a handoff's half failed unexpectedly", exc_info=error)
            self._on_crash(error)

    def tell(self, handoff_id: HandoffId, message: rank_pb2.FromRank) -> None:
        """Says something to rank 0. Any thread."""
        message.handoff_id = handoff_id
        try:
            self._channel.send(Kind.HANDOFF, message.SerializeToString())
        except LinkClosed as exc:
            logger.info("rank 0 is gone: %s", exc)

    def close(self) -> None:
        """Ends the tasks and the loop. Not on the loop itself."""
        asyncio.run_coroutine_threadsafe(cancel_all(list(self._tasks)), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
