"""Both legs of one request as bare calls to the workers of a pair."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from kv_transfer.offer import Offer
from kv_transfer.ticket import Claims
from tandem.errors import RequestCancelled, TandemError
from tandem.rpc.convert import decode_request_to_proto, prefill_request_to_proto
from tandem.rpc.status import from_rpc_error
from tandem.rpc.tandem.v1 import worker_pb2
from tandem.secret import ClusterKey
from tandem.types import Epoch, HandoffId, WorkerId
from tests.factories import CLUSTER_KEY
from tests.pair import SETTLE_S, Pair, make_live_request


@dataclass(kw_only=True)
class Leg:
    """One open call. `task` gives the error that the call ended with, or None."""

    call: Any
    events: list[Any] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[TandemError | None] = field(init=False)

    def __post_init__(self) -> None:
        self.task = asyncio.create_task(self._follow())

    async def _follow(self) -> TandemError | None:
        try:
            async for event in self.call:
                self.events.append(event)
                self.changed.set()
        except grpc.aio.AioRpcError as exc:
            return from_rpc_error(exc)
        except asyncio.CancelledError:
            if not self.call.cancelled():
                raise
            return RequestCancelled("closed by the test")
        finally:
            self.changed.set()
        return None

    async def seen(self, kind: str, *, count: int = 1, timeout_s: float = SETTLE_S) -> Any:
        """The newest event, once `count` of this kind have come; `timeout_s` is for each event."""
        while True:
            of_kind = [event for event in self.events if event.WhichOneof("event") == kind]
            if len(of_kind) >= count:
                return of_kind[-1]
            assert not self.task.done(), f"ended with {self.task.result()!r} before {count} of {kind}"
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), timeout_s)

    async def error(self) -> TandemError | None:
        """How the leg ended."""
        return await asyncio.wait_for(asyncio.shield(self.task), SETTLE_S)

    def close(self) -> None:
        """Cancels the call, as a router does whose client has gone."""
        self.call.cancel()


class Legs:
    """Both legs of one request as bare calls. `decode` is opened first, `prefill` by `open_prefill`."""

    def __init__(self, pair: Pair, prompt: Sequence[int], *, timeout_s: float = 30.0, **sampling: Any) -> None:
        self.pair = pair
        self.timeout_s = timeout_s
        self.request = make_live_request(prompt, timeout_s=timeout_s, **sampling)
        self.handoff_id = HandoffId(uuid.uuid4().hex)
        self.target = worker_pb2.HandoffTarget(
            handoff_id=self.handoff_id,
            decode_worker_id=pair.decode_view.worker_id,
            decode_address=pair.decode_view.address,
            decode_epoch=pair.decode_view.epoch,
        )
        self.prefill: Leg
        self.decode: Leg

    async def open(self) -> Legs:
        """Both legs, in the router's order."""
        await self.open_decode()
        self.open_prefill()
        return self

    async def open_decode(self) -> Leg:
        message = decode_request_to_proto(self.request, now=time.monotonic(), handoff_id=self.handoff_id)
        self.decode = Leg(call=self.pair.decode_stub.Decode(message))
        await self.decode.seen("accepted", timeout_s=self.timeout_s + SETTLE_S)  # it must end by its own deadline
        return self.decode

    def open_prefill(self, *, hands_over: bool = True) -> Leg:
        target = self.target if hands_over else None
        message = prefill_request_to_proto(self.request, now=time.monotonic(), handoff=target)
        self.prefill = Leg(call=self.pair.prefill_stub.Prefill(message))
        return self.prefill

    def tokens(self) -> list[int]:
        """Output so far, from both legs."""
        first = [e.first_token.token_id for e in self.prefill.events if e.WhichOneof("event") == "first_token"]
        rest = [e.token.token_id for e in self.decode.events if e.WhichOneof("event") == "token"]
        return first + rest

    def by_position(self) -> dict[int, int]:
        """The same, by position in the output: where a leg was closed early, some are missing."""
        tokens = {e.token.position: e.token.token_id for e in self.decode.events if e.WhichOneof("event") == "token"}
        for event in self.prefill.events:
            if event.WhichOneof("event") == "first_token":
                tokens[0] = event.first_token.token_id
        return tokens

    async def errors(self) -> tuple[TandemError | None, TandemError | None]:
        """How prefill and decode leg ended."""
        return await self.prefill.error(), await self.decode.error()


def offer_of(legs: Legs, *, key: ClusterKey = CLUSTER_KEY, lifetime_s: float = 60.0, **claims: Any) -> Offer:
    """What an honest prefill worker "silent" would offer for these legs; `claims` differ where a test says so."""
    honest = {
        "handoff_id": legs.handoff_id,
        "request_id": legs.request.request_id,
        "source": WorkerId("silent"),
        "source_epoch": Epoch(2),
        "destination": legs.pair.decode.worker_id,
        "destination_epoch": legs.pair.decode.epoch,
        "expires_s": time.time() + lifetime_s,
    }
    return Offer(
        key=key,
        claims=Claims(**{**honest, **claims}),
        num_prompt_tokens=len(legs.request.prompt_token_ids),
        fingerprint=legs.pair.prefill_view.fingerprint,
    )
