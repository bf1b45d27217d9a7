"""A request's grammar, compiled before its leg begins: neither the event loop nor the engine waits for it."""

from __future__ import annotations

import asyncio
import time

from tandem.errors import DeadlineExceeded
from tandem.model.grammar import CompiledGrammar, GrammarCompiler
from tandem.types import Request


async def compiled_grammar(compiler: GrammarCompiler, request: Request) -> CompiledGrammar | None:
    """None where the request has none. Raises InvalidRequest, and DeadlineExceeded when its time runs out first."""
    if request.sampling.grammar is None:
        return None
    try:
        async with asyncio.timeout(request.deadline_s - time.monotonic()):
            return await compiler.compile(request.sampling.grammar)
    except TimeoutError as exc:
        raise DeadlineExceeded("the request's time ran out while its grammar was compiled") from exc
