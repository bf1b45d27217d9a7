"""What gRPC and HTTP share: from a prompt and options to a stream of text.

Validates, tokenizes once, dispatches, and knows the requests that run here (for cancel, limits and drain). Which
workers serve a request is the dispatcher's decision.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from router.choice_text import ChoiceText, StopRules
from router.dispatch import Dispatcher, ServedModel
from router.output import OutputDelta
from router.prepared import PreparedRequest
from router.prompt import Conversation, Prompt, check_length, check_prompt, tokenize
from router.slot import Slot
from router.stream import OutputStream
from router.timing import TokenClock
from router.tokenizer import ChatTokenizer
from router.tool_parser import ToolCallParser
from router.tools import NO_TOOLS, ToolUse, tool_grammar
from router.validation import (
    ContextLimit,
    SamplingOptions,
    check_options,
    check_request_id,
    check_together,
    resolve_sampling,
    resolve_timeout,
)
from tandem.config import RouterConfig
from tandem.errors import (
    DeadlineExceeded,
    DuplicateRequest,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    RequestCancelled,
    RequestNotFound,
    TandemError,
    WorkerUnavailable,
)
from tandem.model.grammar import check_grammar
from tandem.observability.metrics import RouterMetrics
from tandem.types import Grammar, Request, RequestId

_LOG = logging.getLogger(__name__)

_MAX_TOKENIZING = 4
"""Prompts tokenized at once."""
_MAX_KNOWN_GRAMMARS = 256


def _new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class _ChoiceTexts:
    """Makes the text of each choice of one request."""

    def __init__(self, tokenizer: ChatTokenizer, options: SamplingOptions, tools: ToolUse) -> None:
        self._tokenizer = tokenizer
        self._tools = tools
        self._stop = StopRules(
            texts=options.stop,
            token_ids=options.stop_token_ids,
            is_included=options.include_stop_str_in_output,
            min_tokens=options.min_tokens or 0,
            calls_are_plain=tools.is_named,
        )

    def make(self, choice: int) -> ChoiceText:
        """A new one."""
        parser = ToolCallParser(_new_call_id) if self._tools.offered else None
        return ChoiceText(choice, self._tokenizer.detokenizer(), self._stop, parser)


class Frontend:
    """The open requests of one router. One event loop."""

    def __init__(
        self, *, dispatcher: Dispatcher, tokenizer: ChatTokenizer, config: RouterConfig, metrics: RouterMetrics
    ) -> None:
        self.dispatcher = dispatcher
        self.tokenizer = tokenizer
        self.metrics = metrics
        self._config = config
        self._random = random.SystemRandom()
        self._slots: dict[RequestId, Slot] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._tokenizing = asyncio.Semaphore(_MAX_TOKENIZING)
        self._checking = asyncio.Semaphore(1)
        self._known_grammars: OrderedDict[Grammar, None] = OrderedDict()
        """Those that could be read lately."""

    @property
    def num_running(self) -> int:
        """Requests open here."""
        return len(self._slots)

    @property
    def max_outputs_at_once(self) -> int:
        """Outputs that one request of several prompts may have under way."""
        return self._config.max_outputs_at_once

    @property
    def is_draining(self) -> bool:
        """Whether it is shutting down."""
        return self._draining

    @property
    def accepts_requests(self) -> bool:
        """Whether a request sent now would be served: workers are ready, and the router is not shutting down."""
        return not self._draining and self.dispatcher.ready()

    def served_model(self, name: str = "") -> ServedModel:
        """The model `name`; empty means the only one. Raises ModelNotFound, WorkerUnavailable before any is ready."""
        model = self.dispatcher.model()
        if model is None:
            raise WorkerUnavailable("no worker is ready yet; try again shortly", retry_after_s=1.0)
        if name not in ("", model.name):
            raise ModelNotFound(
                f"the model {name!r} is not served here; this router serves {model.name!r}", param="model"
            )
        return model

    async def open(
        self,
        prompt: Prompt,
        options: SamplingOptions,
        *,
        request_id: str = "",
        timeout_s: float | None = None,
        arrival_s: float | None = None,
    ) -> OutputStream:
        """Starts a request. The caller must close the stream it gets, best with `async with`. See `prepare`."""
        prepared = await self.prepare(
            prompt, options, request_id=request_id, timeout_s=timeout_s, arrival_s=arrival_s
        )
        return prepared.start()

    async def prepare(
        self,
        prompt: Prompt,
        options: SamplingOptions,
        *,
        request_id: str = "",
        timeout_s: float | None = None,
        arrival_s: float | None = None,
    ) -> PreparedRequest:
        """Checks and tokenizes a request, which counts as running from now on. The caller must start or drop it.

        `arrival_s` is on the clock of `time.monotonic`; default now. Raises TandemError.
        """
        arrival_s = time.monotonic() if arrival_s is None else arrival_s
        slot_id: RequestId | None = None
        try:
            model = self._check(prompt, options, request_id)
            timeout_s = resolve_timeout(timeout_s, default_s=self._config.default_timeout_s)
            slot_id = self._admit(request_id or uuid.uuid4().hex)
            check_length(
                prompt,
                max_context_tokens=model.max_context_tokens,
                longest_token_chars=self.tokenizer.longest_token_chars,
            )
            options = self._held_to_tools(prompt, options)
            reading = self._read(prompt, options, arrival_s + timeout_s)
            token_ids = await self._slots[slot_id].prepare(reading)
            sampling = resolve_sampling(
                options,
                num_prompt_tokens=len(token_ids),
                context=ContextLimit(
                    tokens=model.max_context_tokens,
                    model_tokens=model.model_context_tokens,
                    block_size=model.block_size,
                    decode_blocks=model.decode_blocks,
                ),
                eos_token_ids=self.tokenizer.eos_token_ids,
                random_seed=self._random.getrandbits(63),
            )
            request = Request(
                request_id=slot_id,
                prompt_token_ids=tuple(token_ids),
                sampling=sampling,
                arrival_s=arrival_s,
                deadline_s=arrival_s + timeout_s,
                num_choices=options.n or 1,
                cache_salt=options.cache_salt,
                priority=options.priority or 0,
            )
            tools = prompt.tools if isinstance(prompt, Conversation) else NO_TOOLS
            texts = _ChoiceTexts(self.tokenizer, options, tools)
            return self._prepared(request, texts, time.monotonic())
        except BaseException as exc:
            self._refuse(slot_id, exc)
            raise

    def _prepared(self, request: Request, texts: _ChoiceTexts, tokenized_s: float) -> PreparedRequest:
        def start() -> OutputStream:
            try:
                return self._start(request, texts, tokenized_s)
            except BaseException as exc:
                self._refuse(request.request_id, exc)
                raise

        def drop() -> None:
            self._refuse(request.request_id, RequestCancelled("never started"))

        return PreparedRequest(request, start=start, drop=drop)

    def _refuse(self, slot_id: RequestId | None, error: BaseException) -> None:
        """A request ends before workers have heard of it."""
        self._release(slot_id)
        code = error.code if isinstance(error, TandemError) else RequestCancelled.code
        self.metrics.requests.labels(code=code).inc()

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Around what a protocol's front checks by itself, before `prepare`: what it refuses is a request, too."""
        try:
            yield
        except TandemError as exc:
            self._refuse(None, exc)
            raise

    async def prompt_tokens(self, prompt: Prompt) -> Sequence[int]:
        """The token ids that a request with this prompt would have. Raises TandemError."""
        model = self.served_model()
        check_prompt(prompt, vocab_size=self.tokenizer.vocab_size)
        check_length(
            prompt,
            max_context_tokens=model.max_context_tokens,
            longest_token_chars=self.tokenizer.longest_token_chars,
        )
        return await self._tokenize(prompt, time.monotonic() + self._config.default_timeout_s)

    async def _read(self, prompt: Prompt, options: SamplingOptions, deadline_s: float) -> Sequence[int]:
        await self._check_grammar(options, deadline_s)
        return await self._tokenize(prompt, deadline_s)

    async def _tokenize(self, prompt: Prompt, deadline_s: float) -> Sequence[int]:
        """A few at a time, so that long texts do not starve the streams; the wait counts against the deadline."""
        try:
            async with asyncio.timeout(deadline_s - time.monotonic()), self._tokenizing:
                return await tokenize(self.tokenizer, prompt)
        except TimeoutError as exc:
            raise DeadlineExceeded("the request's time ran out before its prompt was tokenized") from exc

    def _held_to_tools(self, prompt: Prompt, options: SamplingOptions) -> SamplingOptions:
        """The options with the grammar that the prompt's tools ask for. Raises InvalidRequest where both have one."""
        if not isinstance(prompt, Conversation) or not prompt.tools.offered:
            return options
        if options.grammar is not None:
            field = options.grammar_field
            raise InvalidRequest(f"{field} does not go with tools: a call is in no such form", param=field)
        if self.tokenizer.tool_format is None:
            raise InvalidRequest("this model's way to call tools is not supported", param="tools")
        grammar = tool_grammar(prompt.tools, self.tokenizer.tool_format)
        options = replace(options, grammar=grammar, grammar_field="tools")
        check_together(options)
        return options

    async def _check_grammar(self, options: SamplingOptions, deadline_s: float) -> None:
        """Whether it can be read, before any worker hears of it. Reading takes a thread, one at a time."""
        grammar = options.grammar
        if grammar is None or grammar in self._known_grammars:
            return
        try:
            async with asyncio.timeout(deadline_s - time.monotonic()), self._checking:
                await asyncio.to_thread(check_grammar, grammar, param=options.grammar_field)
        except TimeoutError as exc:
            raise DeadlineExceeded("the request's time ran out before its grammar was read") from exc
        self._known_grammars[grammar] = None
        while len(self._known_grammars) > _MAX_KNOWN_GRAMMARS:
            self._known_grammars.popitem(last=False)

    async def generate(
        self,
        prompt: Prompt,
        options: SamplingOptions,
        *,
        request_id: str = "",
        timeout_s: float | None = None,
        arrival_s: float | None = None,
    ) -> AsyncIterator[OutputDelta]:
        """`open` as a plain generator; close it (`contextlib.aclosing`) to stop the request early."""
        opened = self.open(prompt, options, request_id=request_id, timeout_s=timeout_s, arrival_s=arrival_s)
        async with await opened as stream:
            async for delta in stream:
                yield delta

    def cancel(self, request_id: str) -> None:
        """Ends a running request. Raises RequestNotFound."""
        slot = self._slots.get(RequestId(request_id))
        if slot is None:
            raise RequestNotFound(f"no request {request_id!r} runs here", param="request_id")
        slot.end(RequestCancelled(f"the request {request_id!r} was cancelled"))

    async def drain(self, grace_s: float) -> None:
        """Refuses new requests, waits `grace_s` seconds for the running ones, then ends them. Idempotent."""
        self._draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            for slot in list(self._slots.values()):
                slot.end(WorkerUnavailable("the router is shutting down; the time for running requests is over"))
            await self._idle.wait()

    def _check(self, prompt: Prompt, options: SamplingOptions, request_id: str) -> ServedModel:
        model = self.served_model()
        check_options(options, vocab_size=self.tokenizer.vocab_size)
        check_prompt(prompt, vocab_size=self.tokenizer.vocab_size)
        if request_id:
            check_request_id(request_id)
        return model

    def _admit(self, request_id: str) -> RequestId:
        if self._draining:
            raise WorkerUnavailable("the router is shutting down")
        if len(self._slots) >= self._config.max_running_requests:
            raise Overloaded(f"{len(self._slots)} requests are running, the most this router takes", retry_after_s=1.0)
        slot_id = RequestId(request_id)
        if slot_id in self._slots:
            raise DuplicateRequest(f"a request with the id {request_id!r} is running", param="request_id")
        self._slots[slot_id] = Slot()
        self._idle.clear()
        self.metrics.running.inc()
        return slot_id

    def _release(self, slot_id: RequestId | None) -> None:
        if slot_id is not None and self._slots.pop(slot_id, None) is not None:
            self.metrics.running.dec()
            if not self._slots:
                self._idle.set()

    def _start(self, request: Request, texts: _ChoiceTexts, tokenized_s: float) -> OutputStream:
        slot = self._slots[request.request_id]
        if slot.ended_by is not None:
            raise slot.ended_by
        slot.stream = OutputStream(
            request,
            self.dispatcher.dispatch(request),
            texts=[texts.make(choice) for choice in range(request.num_choices)],
            clock=TokenClock(arrival_s=request.arrival_s, tokenized_s=tokenized_s),
            max_buffered_tokens=self._config.output_buffer_tokens,
            on_closed=self._closed,
        )
        return slot.stream

    def _closed(self, stream: OutputStream) -> None:
        self._release(stream.request.request_id)
        clock, metrics = stream.clock, self.metrics
        outcome = stream.outcome or RequestCancelled.code
        metrics.ended(outcome, stream.timings)
        metrics.prompt_tokens.inc(len(stream.request.prompt_token_ids))
        metrics.cached_tokens.inc(stream.usage.cached_tokens if stream.usage is not None else 0)
        metrics.completion_tokens.inc(clock.num_tokens)
        metrics.request_duration.observe(clock.elapsed_s(time.monotonic()))
        if (ttft_s := clock.ttft_s()) is not None:
            metrics.time_to_first_token.observe(ttft_s)
        for gap_s in clock.gaps_s():
            metrics.time_between_tokens.observe(gap_s)
        _LOG.info(
            "request ended",
            extra={"request_id": stream.request.request_id, "code": outcome, "num_tokens": clock.num_tokens},
        )
