"""A decode worker: legs, incoming handoffs, and the engine over `scheduler.DecodeScheduler`.

Owns legs and their life; which sequences run is the scheduler's, how KV arrives is `kv_transfer`'s.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from decode_pool.batch import NO_TOKEN, slice_of
from decode_pool.block_moves import move_blocks
from decode_pool.leg import Leg, timings_of
from decode_pool.plan import DecodeOutput, DecodePlan, DecodeStep
from decode_pool.scheduler import DecodeScheduler
from kv_transfer.destination import DestinationHandoff
from kv_transfer.destination_ranks import DestinationRanks
from kv_transfer.handoff import Record
from kv_transfer.incoming import IncomingHandoff, ReceiveCallbacks
from kv_transfer.offer import TicketOffice
from kv_transfer.receiver import HandoffReceiver
from kv_transfer.transport import Transport
from tandem.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    DuplicateRequest,
    HandoffFailed,
    IncompatiblePeer,
    InvalidRequest,
    TandemError,
    TicketRefused,
    WorkerUnavailable,
)
from tandem.kv.block_copies import BlockCopies
from tandem.kv.prefix_pool import PrefixPool
from tandem.model.choice import Choice, check_token_ids, dead_end, make_choices
from tandem.model.executor import Executor
from tandem.model.grammar import CompiledGrammar
from tandem.observability.worker_metrics import DecodeMetrics
from tandem.rpc.convert import check_prefix, decoded_token_to_proto, handoff_id_from_wire
from tandem.rpc.tandem.v1 import worker_pb2
from tandem.secret import ClusterKey
from tandem.types import Epoch, HandoffId, Request, RequestId, SampledToken, WorkerId
from tandem.worker.engine import Engine
from tandem.worker.prefix_tiers import NO_TIERS, PrefixTiers
from tandem.worker.write_back import WriteBack, WriteBackSettings


class DecodeWorker:
    """All methods but the engine's hooks are for the event loop that made it."""

    def __init__(
        self,
        executor: Executor,
        *,
        worker_id: WorkerId,
        epoch: Epoch,
        fingerprint: str,
        key: ClusterKey,
        transport: Transport,
        max_batch_sequences: int,
        growth_tokens: int = 256,
        swap_blocks: int = 0,
        lease_s: float,
        on_crash: Callable[[BaseException], None],
        tiers: PrefixTiers = NO_TIERS,
        ranks: DestinationRanks | None = None,
    ) -> None:
        self.worker_id = worker_id
        self.epoch = epoch
        self.executor = executor
        self.transport = transport
        self.num_tokens = 0
        self.metrics = DecodeMetrics()
        self.is_draining = False
        self._fingerprint = fingerprint
        self._lease_s = lease_s
        self._loop = asyncio.get_running_loop()
        self._legs: dict[RequestId, Leg] = {}
        self._by_handoff: dict[HandoffId, Leg] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self.scheduler = DecodeScheduler(
            PrefixPool(executor.cache.num_blocks),
            block_size=executor.cache.layout.block_size,
            max_batch_sequences=max_batch_sequences,
            growth_tokens=growth_tokens,
            num_swap_slots=swap_blocks,
        )
        executor.open_swap(swap_blocks)
        self._engine: Engine[DecodePlan, list[SampledToken]] = Engine(
            "decode-engine", schedule=self._schedule, execute=self._execute, commit=self._commit, on_crash=on_crash
        )
        self._office = TicketOffice(key, worker_id=worker_id, epoch=epoch)
        self._ranks = ranks
        self.receiver = HandoffReceiver(cache=executor.cache, transport=transport, office=self._office, ranks=ranks)
        self._tiers = tiers
        self.write_back = WriteBack(
            pool=self.scheduler.pool,
            lock=self._engine.lock,
            copies=BlockCopies(executor.cache),
            on_released=self._on_room,
            client=tiers.client,
            announcer=tiers.announcer,
            settings=WriteBackSettings(policy=tiers.write_policy),
        )
        self.write_back.start()
        self._engine.start()

    @property
    def lock(self) -> threading.Condition:
        """Hold it to look at the scheduler: the engine's thread changes it."""
        return self._engine.lock

    @property
    def num_iterations(self) -> int:
        """Iterations since start."""
        return self._engine.num_iterations

    def open_leg(self, request: Request, handoff_id: HandoffId, grammar: CompiledGrammar | None = None) -> Leg:
        """Makes a request known; its handoff may come from now on. `grammar` is its own, compiled.

        Raises TandemError when it can never run here.
        """
        if self.is_draining:
            raise WorkerUnavailable(f"{self.worker_id} is draining")
        known = request.request_id in self._legs or request.request_id in self.scheduler
        if known or handoff_id in self._by_handoff:
            raise DuplicateRequest(f"request {request.request_id} is already on {self.worker_id}", param="request_id")
        if request.sampling.max_tokens < 2:
            raise InvalidRequest("a decode leg needs max_tokens of 2 or more", param="max_tokens")
        self.executor.spec.check_prompt(request.prompt_token_ids)
        num_blocks, capacity = self.scheduler.num_blocks_for(request), self.scheduler.pool.num_blocks
        if num_blocks > capacity:
            param = "n" if request.num_choices > 1 else "max_tokens"
            raise ContextLengthExceeded(
                f"prompt, n and max_tokens need {num_blocks} KV blocks, {capacity} are here", param=param
            )
        check_token_ids(request.sampling, self.executor.spec.vocab_size)
        check_prefix(request, self.executor.cache.layout.block_size)
        leg = Leg(request=request, handoff_id=handoff_id, choices=make_choices(request, grammar))
        self._legs[request.request_id] = self._by_handoff[handoff_id] = leg
        self._idle.clear()
        leg.timer = self._loop.call_later(max(0.0, request.deadline_s - time.monotonic()), self._expire, leg)
        return leg

    def abort(self, request_id: RequestId, error: TandemError) -> None:
        """Ends a request in any phase. Unknown ids are fine."""
        leg = self._legs.get(request_id)
        if leg is not None:
            self.fail(leg, error)

    def end_choice(self, request_id: RequestId, choice: int) -> None:
        """Stops one choice, others go on. Unknown ones are fine."""
        leg = self._legs.get(request_id)
        if leg is None or leg.over or not 0 <= choice < leg.request.num_choices:
            return
        with self._engine.lock:
            leg.ended_choices.add(choice)
            is_last = self.scheduler.end_choice(request_id, choice) and leg.delivered_s > 0
        if is_last:
            self._finish(leg)
        else:
            self._reserve()
            self._engine.wake()

    def start_draining(self) -> None:
        """Refuses new requests."""
        self.is_draining = True

    async def wait_idle(self) -> None:
        """Returns when no leg and no handoff is left."""
        await self._idle.wait()

    def end_requests(self) -> None:
        """Ends what has not ended: the worker shuts down."""
        for leg in list(self._legs.values()):
            self.fail(leg, WorkerUnavailable(f"{self.worker_id} is stopping: it shut down before the request ended"))

    async def close(self) -> None:
        """Aborts what is left, ends threads, frees the cache."""
        self.end_requests()
        try:
            async with asyncio.timeout(self._lease_s):
                await self._idle.wait()
        except TimeoutError:
            pass  # a peer that stands still: closing the transport below fences it
        await asyncio.to_thread(self._engine.stop)
        await self.write_back.close()
        await self._tiers.close()
        if self._ranks is not None:
            await asyncio.to_thread(self._ranks.close)
        self.executor.grammars.close()
        self.transport.close()

    # --- handoffs

    async def handoff(
        self, offer: worker_pb2.HandoffOffer, messages: AsyncIterator[worker_pb2.SourceMessage]
    ) -> AsyncIterator[worker_pb2.DestinationMessage]:
        """One handoff's control stream after its offer. Raises TandemError when the offer cannot be taken."""
        incoming = self._take(offer)
        self._reserve()
        async for message in self.receiver.converse(incoming, messages):
            yield message

    def _take(self, offer: worker_pb2.HandoffOffer) -> IncomingHandoff:
        handoff_id, wall_s = handoff_id_from_wire(offer.handoff_id), time.time()
        claims = self._office.take(offer, now=wall_s)
        leg = self._by_handoff.get(handoff_id)
        if leg is None or leg.over:
            raise HandoffFailed(f"no decode leg waits for handoff {offer.handoff_id}: its request has ended")
        if offer.fingerprint != self._fingerprint:
            error = IncompatiblePeer(f"{offer.prefill_worker_id} has another model or KV layout than {self.worker_id}")
            self.fail(leg, error)
            raise error
        if claims.request_id != leg.request.request_id:
            raise TicketRefused(f"the offer of handoff {handoff_id} is for request {claims.request_id}")
        if offer.num_prompt_tokens != len(leg.request.prompt_token_ids) or leg.handoff is not None:
            raise HandoffFailed("the offer does not match the decode leg")
        layout, now = self.executor.cache.layout, time.monotonic()
        machine = DestinationHandoff(
            epoch=self.epoch,
            lanes=self.receiver.lanes_from(claims),
            num_blocks=layout.num_blocks_for(offer.num_prompt_tokens),
            lease_s=self._lease_s,
            now=now,
        )
        incoming = IncomingHandoff(
            claims=replace(claims, expires_s=wall_s + leg.request.deadline_s - now),
            machine=machine,
            desk=self.receiver,
            now=wall_s,
            callbacks=ReceiveCallbacks(
                delivered=lambda record: self._on_delivered(leg, record),
                failed=lambda error: self._soon(self.fail, leg, error),
                released=lambda: self._soon(self._release, leg),
            ),
        )
        self.receiver.open(incoming)
        leg.handoff = incoming
        with self._engine.lock:
            self.scheduler.add(leg.request)
        return incoming

    def _reserve(self) -> None:
        """Gives blocks to the first offers in order, and their tickets to the prefill workers."""
        with self._engine.lock:
            reserved = [(self._legs[r], self.scheduler.reservation(r)) for r in self.scheduler.reserve()]
            self._engine.lock.notify()  # whoever waits first may be the engine's to bring back, or have others swapped
        for leg, blocks in reserved:
            assert leg.handoff is not None
            leg.handoff.reserved(blocks.block_ids, first_block=blocks.num_found)

    def _on_delivered(self, leg: Leg, record: Record) -> None:
        """Any thread. The blocks are the sequences' from here on."""
        leg.delivered_s = time.monotonic()
        if not self._accepts(leg, record):
            self._soon(self.fail, leg, HandoffFailed(f"a record whose first tokens cannot be: {record.first}"))
            self._soon(self._release, leg)
            return
        self.metrics.delivered()
        with self._engine.lock:
            live = tuple(s for s in record.first if s.finish_reason is None and s.choice not in leg.ended_choices)
            if live and not leg.over:
                self.scheduler.deliver(leg.request.request_id, live)
                self._engine.lock.notify()
                return
        self._soon(self._finish, leg)

    def _accepts(self, leg: Leg, record: Record) -> bool:
        """Whether a record has a possible first token for each choice; the choices go on with them."""
        in_order = [step.choice for step in record.first] == list(range(leg.request.num_choices))
        in_vocabulary = all(0 <= step.token_id < self.executor.spec.vocab_size for step in record.first)
        return (
            in_order
            and in_vocabulary
            and all(c.append(step.token_id) for c, step in zip(leg.choices, record.first, strict=True))
        )

    # --- ends of a leg (event loop)

    def _expire(self, leg: Leg) -> None:
        self.fail(leg, DeadlineExceeded("the request's time ran out in the decode pool"))

    def fail(self, leg: Leg, error: TandemError) -> None:
        """Ends a leg early. Blocks that a handoff still holds come back through `_release`."""
        if leg.over:
            return
        leg.over = True
        leg.events.put_nowait(error)
        self.metrics.failed(error, moving=leg.handoff is not None and not leg.delivered_s)
        with self._engine.lock:
            owned = self.scheduler.abort(leg.request.request_id)
        if leg.handoff is not None:
            leg.handoff.abort(error)
        if owned:
            self._forget(leg)

    def _finish(self, leg: Leg) -> None:
        """Ends a leg whose output is complete."""
        with self._engine.lock:
            self.scheduler.release(leg.request.request_id)
        if not leg.over:
            leg.over = True
            timings = timings_of(leg)
            self.metrics.completed(timings)
            done = worker_pb2.DecodeDone(timings=timings)
            leg.events.put_nowait(worker_pb2.DecodeEvent(done=done))
        self._forget(leg)

    def _release(self, leg: Leg) -> None:
        """The handoff has let go of the blocks of a leg that failed."""
        with self._engine.lock:
            self.scheduler.release(leg.request.request_id)
        self._forget(leg)

    def _forget(self, leg: Leg) -> None:
        if leg.timer is not None:
            leg.timer.cancel()
        if self._legs.get(leg.request.request_id) is leg:
            del self._legs[leg.request.request_id]
            del self._by_handoff[leg.handoff_id]
        if not self._legs:
            self._idle.set()
        self.write_back.changed()
        self._on_room()

    def _on_room(self) -> None:
        """Blocks came back: offers and sequences that wait for some may go on."""
        self._reserve()
        self._engine.wake()

    def _on_outputs(self, outputs: tuple[DecodeOutput, ...]) -> None:
        for request_id in dict.fromkeys(output.request_id for output in outputs):
            if (leg := self._legs.get(request_id)) is not None:
                leg.num_iterations += 1
        for output in outputs:
            leg = self._legs.get(output.request_id)
            if leg is None or leg.over:
                continue
            token = decoded_token_to_proto(output.step)
            leg.events.put_nowait(worker_pb2.DecodeEvent(token=token))
            if output.is_last:
                self._finish(leg)
        self._reserve()

    def _soon(self, function: Callable[..., None], *arguments: object) -> None:
        self._loop.call_soon_threadsafe(function, *arguments)

    # --- engine thread

    def _schedule(self) -> DecodePlan | None:
        plan = self.scheduler.schedule()
        if self.scheduler.has_reserved:
            self._soon(self._reserve)
        return None if plan.is_empty else plan

    def _execute(self, plan: DecodePlan) -> list[SampledToken]:
        now = time.monotonic()
        for request_id in plan.admitted:
            leg = self._legs.get(request_id)
            if leg is not None:
                leg.started_s = now
        move_blocks(self.executor, plan, self.metrics)
        if not plan.steps:
            return []
        choices = [self._choice_of(step) for step in plan.steps]
        outputs = self.executor.execute(
            [slice_of(step, choice) for step, choice in zip(plan.steps, choices, strict=True)]
        )
        self.metrics.iteration(time.monotonic() - now, num_sequences=len(plan.steps))
        tokens = [output.tokens[0] if output.tokens else NO_TOKEN for output in outputs]
        for step, choice, token in zip(plan.steps, choices, tokens, strict=True):
            if choice is not None and not choice.append(token.token_id):
                self._soon(self.abort, step.request.request_id, dead_end())
        return tokens

    def _choice_of(self, step: DecodeStep) -> Choice | None:
        """None when the leg has ended while its step was on its way: then the scheduler drops what comes of it."""
        leg = self._legs.get(step.request.request_id)
        return None if leg is None else leg.choices[step.choice]

    def _commit(self, plan: DecodePlan, tokens: list[SampledToken]) -> Callable[[], None]:
        outputs = self.scheduler.commit(plan, tokens)
        self.num_tokens += len(tokens)
        self.write_back.changed()
        return lambda: self._soon(self._on_outputs, outputs)
