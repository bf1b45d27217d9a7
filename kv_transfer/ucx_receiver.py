"""The receiving half of the UCX transport: what was announced, what is being received, and where it may be written.

A payload is received straight into the placed memory only where the link's large payloads are fetched by this side
(cma, RDMA read) and the memory is one piece: such a receive ends by itself, whatever the sender does. All others go
through a staging buffer where the placed memory lies (on a GPU always: how UCX moves it is not known beforehand),
which a stuck sender may hold for ever while the placed memory is free at once.
"""

from __future__ import annotations

import logging
import os
import select
from collections import deque
from concurrent.futures import Future
from typing import Any

from kv_transfer import device_memory, placing
from kv_transfer.device_memory import Memory
from kv_transfer.host import ProcessIdentity, open_process
from kv_transfer.progress import ProgressThread
from kv_transfer.segments import HOST, Bytes, check_digest
from kv_transfer.staging import StagingPool
from kv_transfer.transport import MessageHeader, Sink
from kv_transfer.ucx_inbox import ControlInbox, Incoming, Quiesce, Source, readable
from kv_transfer.ucx_native import RENDEZVOUS_BYTES, Worker
from kv_transfer.ucx_wire import (
    PAYLOAD_MASK,
    PAYLOAD_TAG,
    Announce,
    Bye,
    Control,
    Hello,
    payload_tag,
    tag_nonce,
)
from tandem.errors import LinkClosed, TransportError
from tandem.types import HandoffId

logger = logging.getLogger(__name__)


class UcxReceiver:
    """All of it runs on the transport's thread."""

    def __init__(
        self, worker: Worker, sink: Sink, thread: ProgressThread, staging: StagingPool, *, identity: ProcessIdentity
    ) -> None:
        self._worker = worker
        self._sink = sink
        self._thread = thread
        self._staging = staging
        self._identity = identity
        self._sources: dict[int, Source] = {}
        self._controls = ControlInbox(worker, self._on_control)
        self._announced: dict[int, tuple[int, MessageHeader, Source]] = {}
        """By tag: number, header and who announced it."""
        self._early: dict[int, Any] = {}
        self._incoming: dict[Incoming, None] = {}
        """In the order in which they were begun."""
        self._undigested: deque[Incoming] = deque()
        self._alive: set[int] = set()
        """Nonces of sources that were asked for in this turn."""
        self._scratch: list[tuple[Any, Bytes, int]] = []
        """Receives into memory that nobody reads: request, memory, nonce."""
        self._unwanted: dict[int, deque[Any]] = {}
        """By nonce: large payloads to be thrown away, one after another."""
        self._quiescing: list[Quiesce] = []
        self._dead_nonces: set[int] = set()
        self._unfetched: list[Any] = []

    @property
    def idle(self) -> bool:
        """Whether UCX holds no receive of ours."""
        return not self._incoming and not self._scratch and self._controls.idle

    @property
    def unfinished(self) -> list[Any]:
        """UCX's requests that have not completed."""
        requests = [entry.request for entry in self._incoming] + [request for request, _, _ in self._scratch]
        return [request for request in requests if not request.completed] + self._controls.unfinished

    @property
    def fetching(self) -> bool:
        """Whether a receive is under way that ends by itself."""
        return any(entry.staging is None for entry in self._incoming)

    def advance(self) -> bool:
        """Takes what arrived and reports what is complete. True when something happened."""
        done = [entry for entry in self._incoming if entry.request.completed]
        if done:
            # A sender says BYE before it writes its memory again: a BYE that is here by now came during the read.
            while self._worker.progress():
                self.digest_completed()
        moved = self._controls.take()
        for entry in done:
            del self._incoming[entry]
            self._finish(entry)
        self._reuse_scratch()
        return self._take_payloads() or moved or bool(done)

    def digest_completed(self) -> None:
        """Between two steps of the worker: digests what came just now, while it is still in a cache."""
        while self._undigested and self._undigested[0].request.completed:
            entry = self._undigested.popleft()
            if entry.targets is not None:
                entry.digest = device_memory.digest_memory(entry.targets)

    def quiesce(self, handoff_id: HandoffId, future: Future[None]) -> None:
        """Detaches staged receives at once; direct ones end by themselves, soon, and are waited for."""
        waiting = Quiesce(future=future)
        for entry in [e for e in self._incoming if e.header.handoff_id == handoff_id and e.targets is not None]:
            if entry.staging is None:
                entry.cancelled = True
                waiting.remaining.add(entry)
            else:
                self._detach(entry, TransportError("the handoff was quiesced"))
        if waiting.remaining:
            self._quiescing.append(waiting)
        else:
            future.set_result(None)

    def close(self) -> list[Incoming]:
        """Lets go of all sources. Returns what was placed and not finished, for `report_closed`."""
        for source in list(self._sources.values()):
            self._drop_source(source)
        return [entry for entry in self._incoming if entry.targets is not None]

    def report_closed(self, unfinished: list[Incoming]) -> None:
        """Tells the sink, once the worker is gone and nothing can be written any more."""
        for entry in unfinished:
            self._detach(entry, LinkClosed("the transport was closed"))
        for waiting in self._quiescing:
            waiting.future.set_result(None)
        self._quiescing.clear()

    def _detach(self, entry: Incoming, error: TransportError) -> None:
        """The placed memory is free from here on; the receive goes on into its staging buffer, if at all."""
        entry.targets = None
        placing.landed(self._sink, entry.header, error)

    def _detach_staged(self, entry: Incoming, error: TransportError) -> None:
        """Detaches what is received into staging; what goes straight into placed memory ends by itself."""
        if entry.staging is not None and entry.targets is not None:
            self._detach(entry, error)

    def _on_control(self, message: Control) -> None:
        if isinstance(message, Hello):
            self._add_source(message)
            return
        source = self._sources.get(message.nonce)
        if source is None:
            raise TransportError(f"link {message.nonce:x} was never opened")
        if isinstance(message, Bye):
            self._on_bye(message, source)
        elif isinstance(message, Announce):
            for number, header in message.messages:
                self._announced[payload_tag(message.nonce, number)] = (number, header, source)

    def _on_bye(self, bye: Bye, source: Source) -> None:
        """Messages that the sender took for done stay good, even where their payload is still to be taken."""
        for number in bye.withdrawn:
            self._announced.pop(payload_tag(bye.nonce, number), None)
        for entry in [e for e in self._incoming if e.source is source and e.number in bye.withdrawn]:
            entry.withdrawn = True
            self._detach_staged(entry, LinkClosed("the source closed the link"))
        self._drop_source(source)

    def _add_source(self, hello: Hello) -> None:
        if hello.nonce in self._sources:
            raise TransportError(f"link {hello.nonce:x} is open already")
        pidfd = open_process(hello.identity) if hello.identity.host == self._identity.host else None
        source = Source(nonce=hello.nonce, reads_remote=hello.reads_remote, pidfd=pidfd)
        self._sources[hello.nonce] = source
        if pidfd is not None:
            self._thread.register(pidfd, select.EPOLLIN, lambda _: self._on_death(source))

    def _on_death(self, source: Source) -> None:
        """The source's process ended: what it announced and we did not begin to fetch can never be fetched."""
        source.dead = True
        self._dead_nonces.add(source.nonce)
        self._drop_source(source)
        for tag, (_, header, announced_by) in list(self._announced.items()):
            if announced_by is source and header.num_bytes >= RENDEZVOUS_BYTES:
                del self._announced[tag]
        for entry in [e for e in self._incoming if e.source is source and not e.request.completed]:
            self._detach_staged(entry, LinkClosed("the source's process ended"))

    def _drop_source(self, source: Source) -> None:
        if self._sources.pop(source.nonce, None) is None:
            return
        if source.pidfd is not None:
            self._thread.unregister(source.pidfd)
            os.close(source.pidfd)
            source.pidfd = None
        for tag in [tag for tag in self._early if tag_nonce(tag) == source.nonce]:
            self._throw_away(self._early.pop(tag))

    def _take_payloads(self) -> bool:
        moved = False
        self._alive.clear()
        for tag in [tag for tag in self._early if tag in self._announced]:
            moved = True
            self._receive(*self._announced.pop(tag), self._early.pop(tag))
        while (probed := self._worker.probe(PAYLOAD_TAG, PAYLOAD_MASK)) is not None:
            moved = True
            tag = int(probed.sender_tag.value)
            if (announced := self._announced.pop(tag, None)) is not None:
                self._receive(*announced, probed)
            elif tag_nonce(tag) in self._sources:
                self._early[tag] = probed
            else:
                self._throw_away(probed)
        return moved

    def _receive(self, number: int, header: MessageHeader, source: Source, probed: Any) -> None:
        if probed.length != header.num_bytes:
            logger.warning("a payload of %d bytes, announced as %d", probed.length, header.num_bytes)
            self._throw_away(probed)
            return
        if header.num_bytes >= RENDEZVOUS_BYTES and self._is_dead(source):
            self._throw_away(probed)
            return
        targets = placing.place_memory(self._sink, header)
        if targets is None:
            self._throw_away(probed)
            return
        device = device_memory.device_of(targets)
        direct = len(targets) == 1 and source.reads_remote and device == HOST
        try:
            staging = None if direct else self._staging.take_on(device, header.num_bytes)
        except RuntimeError as exc:  # torch's error for a GPU without memory
            placing.landed(self._sink, header, TransportError(f"no memory to receive into: {exc}"))
            self._throw_away(probed)
            return
        request = self._worker.receive(targets[0] if staging is None else staging, probed)
        entry = Incoming(
            header=header, number=number, source=source, request=request, targets=targets, staging=staging
        )
        self._incoming[entry] = None
        if direct and header.digest:
            self._undigested.append(entry)

    def _throw_away(self, probed: Any) -> None:
        """Receives into scratch memory, so that the sender gets its memory back; a dead one needs none.

        What a dead process announced must not be fetched: after a first failed read UCX has taken its endpoint down,
        and the next one would end this process too. A process that is being killed can be read no more a moment before
        the kernel says that it has ended: so a source's next large payload is fetched only after the last one came.
        """
        if probed.length >= RENDEZVOUS_BYTES and tag_nonce(int(probed.sender_tag.value)) in self._dead_nonces:
            self._unfetched.append(probed)
            return
        nonce = tag_nonce(int(probed.sender_tag.value))
        if probed.length >= RENDEZVOUS_BYTES and self._is_fetched_from(nonce):
            self._unwanted.setdefault(nonce, deque()).append(probed)
            return
        scratch = self._staging.take(max(1, probed.length))
        self._scratch.append((self._worker.receive(scratch[: probed.length], probed), scratch, nonce))

    def _is_dead(self, source: Source) -> bool:
        """Asks the kernel, rather than wait for its event; and what is under way, which may know before it.

        Once in a turn: nothing is fetched before the worker's next step.
        """
        if source.nonce in self._alive:
            return source.dead
        has_ended = source.pidfd is not None and readable(source.pidfd)
        requests = [entry.request for entry in self._incoming if entry.source is source]
        requests += [request for request, _, nonce in self._scratch if nonce == source.nonce]
        if has_ended or any(_has_failed(request) for request in requests):
            self._on_death(source)
        self._alive.add(source.nonce)
        return source.dead

    def _reuse_scratch(self) -> None:
        for entry in [entry for entry in self._scratch if entry[0].completed]:
            self._scratch.remove(entry)
            request, scratch, nonce = entry
            self._staging.give_back(scratch)
            if _has_failed(request):
                self._note_dead(nonce)
        for nonce in [nonce for nonce in self._unwanted if not self._is_fetched_from(nonce)]:
            waiting = self._unwanted[nonce]
            self._throw_away(waiting.popleft())
            if not waiting:
                del self._unwanted[nonce]

    def _is_fetched_from(self, nonce: int) -> bool:
        """Whether a receive from this source is under way."""
        thrown_away = any(entry[2] == nonce for entry in self._scratch)
        return thrown_away or any(entry.source.nonce == nonce for entry in self._incoming)

    def _note_dead(self, nonce: int) -> None:
        """Nothing more can be fetched from this source."""
        source = self._sources.get(nonce)
        if source is not None:
            self._on_death(source)
        else:
            self._dead_nonces.add(nonce)

    def _finish(self, entry: Incoming) -> None:
        if entry.targets is not None:
            placing.landed(self._sink, entry.header, self._outcome(entry, entry.targets))
        if entry.staging is not None:
            self._staging.give_back(entry.staging)
        for waiting in [waiting for waiting in self._quiescing if entry in waiting.remaining]:
            waiting.remaining.discard(entry)
            if not waiting.remaining:
                self._quiescing.remove(waiting)
                waiting.future.set_result(None)

    def _outcome(self, entry: Incoming, targets: list[Memory]) -> TransportError | None:
        try:
            entry.request.check_error()
        except Exception as exc:  # UCXX's errors derive from Exception, one class per UCX status
            self._on_death(entry.source)
            return TransportError(f"UCX could not receive: {exc}")
        if entry.cancelled:
            return TransportError("the handoff was quiesced")
        if entry.withdrawn:
            return LinkClosed("the source closed the link while its message was read")
        wanted = entry.header.digest
        if entry.staging is None:
            found = device_memory.digest_memory(targets) if wanted and entry.digest is None else entry.digest
            return check_digest(wanted, found or 0)
        try:
            return check_digest(wanted, device_memory.scatter(targets, entry.staging, with_digest=wanted != 0))
        except RuntimeError as exc:  # torch's error for a GPU out of order
            return TransportError(f"the GPU could not take the payload: {exc}")


def _has_failed(request: Any) -> bool:
    """Whether a receive has ended with an error."""
    if not request.completed:
        return False
    try:
        request.check_error()
    except Exception:  # UCXX's errors derive from Exception, one class per UCX status
        return True
    return False
