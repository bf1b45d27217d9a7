"""The OpenAI-compatible HTTP face of the router. Translates; the frontend does the work.

Every failure is an OpenAI error body. Answers begin with the first token (or the first error), so an error before
it has its own HTTP status; one after it is an event in the stream.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import Literal

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from router.batch import PromptBatch
from router.frontend import Frontend
from router.openai_choice import ChoiceBody, ChoiceStyle, PromptShown
from router.openai_format import Envelope, Json, error_body, json_bytes, usage_body
from router.openai_tokens import TokenApi
from router.openai_types import ChatBody, CompletionBody, parse_body
from router.output import OutputDelta, merged
from router.prepared import PreparedRequest
from router.prompt import Prompt
from router.sse import DONE, EventStream, event, read_body, until_disconnect
from router.validation import SamplingOptions
from tandem import __version__
from tandem.errors import TandemError, wire_status
from tandem.observability.metrics import METRICS_CONTENT_TYPE
from tandem.rpc.tandem.v1 import inference_pb2


class OpenAiApi:
    """The handlers of one router."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._created = int(time.time())

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._complete(request, CompletionBody)

    async def chat_completions(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._complete(request, ChatBody)

    async def models(self) -> Response:
        """GET /v1/models; empty while no worker is ready."""
        model = self._frontend.dispatcher.model()
        data = [] if model is None else [self._model_body(model.name, model.max_context_tokens)]
        return JSONResponse({"object": "list", "data": data})

    async def model(self, name: str) -> Response:
        """GET /v1/models/{name}."""
        model = self._frontend.served_model(name)
        return JSONResponse(self._model_body(model.name, model.max_context_tokens))

    async def health(self) -> Response:
        """GET /health: 200 while requests are served, else 503."""
        ready = self._frontend.accepts_requests
        return JSONResponse({"status": "ok" if ready else "not ready"}, status_code=200 if ready else 503)

    async def version(self) -> Response:
        """GET /version."""
        return JSONResponse({"version": __version__})

    async def metrics(self) -> Response:
        """GET /metrics."""
        return Response(self._frontend.metrics.render(), headers={"content-type": METRICS_CONTENT_TYPE})

    async def _complete(self, request: Request, kind: type[CompletionBody] | type[ChatBody]) -> Response:
        arrival_s = time.monotonic()
        with self._frontend.counting_refusals():
            body: CompletionBody | ChatBody = parse_body(await read_body(request), kind)
            asked = Asked(
                body=body,
                prompts=body.prompts(),
                options=body.options(),
                model=self._frontend.served_model(body.model).name,
                request_id=body.request_id or uuid.uuid4().hex,
                arrival_s=arrival_s,
            )
        return await until_disconnect(request.receive, self._answer(asked))

    async def _answer(self, asked: Asked) -> Response:
        """Prepares all prompts; answers when the output is complete, or with a stream when its first step is here."""
        headers = {"x-request-id": asked.request_id}
        envelope = asked.envelope()
        async with AsyncExitStack() as stack:
            prepared = await self._prepare(stack, asked)
            limit = self._frontend.max_outputs_at_once
            batch = await stack.enter_async_context(PromptBatch(prepared, max_outputs=limit))
            bodies = self._bodies(asked, batch)
            outputs = await stack.enter_async_context(aclosing(batch.deltas()))
            if not asked.body.stream:
                return await _collect(envelope, batch, bodies, outputs, headers)
            first = await anext(outputs)
            events = _events(envelope, bodies, first, outputs, stack.pop_all())
            await anext(events)  # from here on, closing the generator closes the streams
            return EventStream(events, headers=headers)

    async def _prepare(self, stack: AsyncExitStack, asked: Asked) -> list[PreparedRequest]:
        """All of them, or none: what is wrong with the last prompt is said before the first one runs."""
        prepared = []
        for index, prompt in enumerate(asked.prompts):
            one = await self._frontend.prepare(
                prompt,
                asked.options,
                request_id=asked.request_id if len(asked.prompts) == 1 else f"{asked.request_id}-{index}",
                timeout_s=asked.body.timeout_s,
                arrival_s=asked.arrival_s,
            )
            stack.callback(one.drop)
            prepared.append(one)
            await asyncio.sleep(0)  # others' turn: a short prompt is prepared without waiting for anything
        return prepared

    def _bodies(self, asked: Asked, batch: PromptBatch) -> Bodies:
        """Makes the body of a choice when its first delta is here: then its prompt's scores are known."""
        tokenizer, body = self._frontend.tokenizer, asked.body
        has_echo = isinstance(body, CompletionBody) and bool(body.echo)
        style = ChoiceStyle(
            kind=asked.kind,
            spell=tokenizer.token_text,
            return_token_ids=bool(body.return_token_ids),
            num_logprobs=asked.options.logprobs,
        )

        def make(index: int, choice: int) -> ChoiceBody:
            stream, prompt = batch.streams[index], asked.prompts[index]
            token_ids = stream.request.prompt_token_ids
            echo = None
            if has_echo:
                echo = prompt if isinstance(prompt, str) else tokenizer.decode(token_ids, keep_special=True)
            shown = PromptShown(
                token_ids=token_ids,
                echo=echo,
                logprobs=stream.prompt_logprobs,
                wants_logprobs=body.prompt_logprobs is not None,
            )
            return ChoiceBody(index * stream.request.num_choices + choice, style, shown)

        return Bodies(make)

    def _model_body(self, name: str, max_context_tokens: int) -> Json:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "tandem",
            "max_model_len": max_context_tokens,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """One POST, checked as far as that goes without a model."""

    body: CompletionBody | ChatBody
    prompts: Sequence[Prompt]
    options: SamplingOptions
    model: str
    request_id: str
    arrival_s: float

    @property
    def kind(self) -> Literal["chat", "text"]:
        """Which of the two APIs."""
        return "chat" if isinstance(self.body, ChatBody) else "text"

    def envelope(self) -> Envelope:
        """What all parts of the answer share."""
        return Envelope(
            kind=self.kind,
            response_id=("chatcmpl-" if self.kind == "chat" else "cmpl-") + self.request_id,
            model=self.model,
            include_usage=self.body.include_usage,
        )


class Bodies:
    """The choices of one response, by (stream, choice)."""

    def __init__(self, make: Callable[[int, int], ChoiceBody]) -> None:
        self._make = make
        self._made: dict[tuple[int, int], ChoiceBody] = {}

    def of(self, stream_index: int, choice: int) -> tuple[ChoiceBody, bool]:
        """The body, and whether it is new."""
        key = (stream_index, choice)
        is_new = key not in self._made
        if is_new:
            self._made[key] = self._make(*key)
        return self._made[key], is_new


async def _collect(
    envelope: Envelope,
    batch: PromptBatch,
    bodies: Bodies,
    outputs: AsyncIterator[tuple[int, OutputDelta]],
    headers: dict[str, str],
) -> Response:
    """The whole answer: all choices by index, usage summed. Raises the first error of any choice.

    A choice is written when it ends, so that no moment has to write them all.
    """
    open_choices: dict[tuple[int, int], list[OutputDelta]] = {}
    written: dict[tuple[int, int], bytes] = {}
    async for index, delta in outputs:
        key = (index, delta.choice)
        open_choices.setdefault(key, []).append(delta)
        if delta.finish_reason is not None:
            body, _ = bodies.of(*key)
            written[key] = json_bytes(body.whole(merged(open_choices.pop(key))))
    usage = usage_body([stream.usage for stream in batch.streams.values() if stream.usage is not None])
    content = envelope.whole([written[key] for key in sorted(written)], usage)
    return Response(content, media_type="application/json", headers=headers)


async def _events(
    envelope: Envelope,
    bodies: Bodies,
    first: tuple[int, OutputDelta],
    rest: AsyncIterator[tuple[int, OutputDelta]],
    stack: AsyncExitStack,
) -> AsyncGenerator[bytes, None]:
    """The events of a streamed answer. The first item is empty: it marks that `stack` is entered."""
    usages: list[inference_pb2.Usage] = []
    async with stack:
        yield b""
        try:
            async for index, delta in _chained(first, rest):
                if delta.usage is not None:
                    usages.append(delta.usage)
                body, is_new = bodies.of(index, delta.choice)
                for choice in ([body.opening()] if is_new else []) + [body.chunk(delta)]:
                    if choice is not None:
                        yield event(envelope.chunk([choice]))
        except TandemError as exc:
            yield event(error_body(exc))
            yield DONE
            return
        if envelope.include_usage:
            yield event(envelope.chunk([], usage=usage_body(usages)))
        yield DONE


async def _chained(
    first: tuple[int, OutputDelta], rest: AsyncIterator[tuple[int, OutputDelta]]
) -> AsyncIterator[tuple[int, OutputDelta]]:
    yield first
    async for item in rest:
        yield item


def make_app(frontend: Frontend) -> FastAPI:
    """The ASGI application."""
    api = OpenAiApi(frontend)
    app = FastAPI(title="Tandem", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_api_route("/v1/completions", api.completions, methods=["POST"], response_model=None)
    app.add_api_route("/v1/chat/completions", api.chat_completions, methods=["POST"], response_model=None)
    app.add_api_route("/v1/models", api.models, methods=["GET"], response_model=None)
    app.add_api_route("/v1/models/{name:path}", api.model, methods=["GET"], response_model=None)
    tokens = TokenApi(frontend)
    app.add_api_route("/tokenize", tokens.tokenize, methods=["POST"], response_model=None)
    app.add_api_route("/detokenize", tokens.detokenize, methods=["POST"], response_model=None)
    app.add_api_route("/version", api.version, methods=["GET"], response_model=None)
    app.add_api_route("/ping", api.health, methods=["GET", "POST"], response_model=None)
    app.add_api_route("/health", api.health, methods=["GET"], response_model=None)
    app.add_api_route("/metrics", api.metrics, methods=["GET"], response_model=None)
    app.add_exception_handler(TandemError, _typed_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _bug)
    return app


async def _typed_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TandemError)
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    return JSONResponse(error_body(error), status_code=wire_status(error).http, headers=headers)


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown routes and wrong methods."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    code = "method_not_allowed" if error.status_code == 405 else "not_found" if error.status_code == 404 else None
    body = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return JSONResponse({"error": body}, status_code=error.status_code, headers=error.headers)


async def _bug(request: Request, error: Exception) -> Response:
    """The server's own log has the trace: Starlette raises the error again after this answer."""
    return JSONResponse(error_body(TandemError(f"internal error ({type(error).__name__})")), status_code=500)
