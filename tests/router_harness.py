"""A real router (gRPC and HTTP on free ports) over a scripted dispatcher, with the default model's real tokenizer."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from router.app import RunningRouter, serve_frontend
from router.frontend import Frontend
from router.tokenizer import ChatTokenizer
from tandem.config import ClusterConfig, RouterConfig
from tandem.model.files import DEFAULT_MODEL, resolve_model
from tandem.observability.metrics import RouterMetrics
from tests.fake_dispatcher import FakeDispatcher, Script

EOS = 2


@functools.cache
def tokenizer() -> ChatTokenizer:
    """The default model's; read once."""
    return ChatTokenizer.load(resolve_model(DEFAULT_MODEL).tokenizer_dir)


def saying(text: str, **script: Any) -> FakeDispatcher:
    """Answers every request with `text`, then end of sequence."""
    return scripted([*tokenizer().encode(text), EOS], **script)


def scripted(token_ids: Sequence[int], **script: Any) -> FakeDispatcher:
    """Answers every request with `token_ids`."""
    return FakeDispatcher(lambda request: Script(token_ids=token_ids, **script))


def make_frontend(dispatcher: FakeDispatcher, **router: Any) -> Frontend:
    """A frontend alone."""
    config = RouterConfig(**router)
    return Frontend(dispatcher=dispatcher, tokenizer=tokenizer(), config=config, metrics=RouterMetrics())


@asynccontextmanager
async def running(dispatcher: FakeDispatcher, **router: Any) -> AsyncIterator[RunningRouter]:
    """A router on free ports; stopped at the end."""
    config = ClusterConfig(router=RouterConfig(grpc_port=0, http_port=0, **router))
    server = await serve_frontend(make_frontend(dispatcher, grpc_port=0, http_port=0, **router), config=config)
    try:
        yield server
    finally:
        await server.stop(0)


def runs_async(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Makes a coroutine function a test, with a limit that turns a hang into a failure."""
    return runs_within(60)(test)


def runs_within(limit_s: float) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Callable[..., None]]:
    """The same with another limit, for what starts processes."""

    def decorate(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            asyncio.run(asyncio.wait_for(test(*args, **kwargs), timeout=limit_s))

        return run

    return decorate
