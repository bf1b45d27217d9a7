"""`tandem chat`: a conversation at the terminal, or line by line from a pipe."""

from __future__ import annotations

import asyncio
import sys
from typing import TextIO

from cluster.access import Access
from cluster.client import Client
from tandem.errors import RequestError
from tandem.rpc.tandem.v1.common_pb2 import FINISH_REASON_LENGTH, SamplingParams
from tandem.rpc.tandem.v1.inference_pb2 import ChatMessage

_HELP = "Ctrl-C stops an answer, Ctrl-D ends."


def run_chat(access: Access | str, sampling: SamplingParams, *, system: str | None) -> None:
    """Reads questions and streams answers until the input ends. Raises TandemError when the router is away."""
    history = [ChatMessage(role="system", content=system)] if system else []
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if interactive:
        import readline  # noqa: F401  line editing and history for input()

        print(_HELP, file=sys.stderr)
    with asyncio.Runner() as runner:
        client = runner.run(Client(access).__aenter__())
        try:
            while (question := _read("> " if interactive else "")) is not None:
                if question.strip():
                    _turn(runner, client, history, question, sampling)
        finally:
            runner.run(client.__aexit__())


def _read(prompt: str) -> str | None:
    """The next line; None at the end of the input. Ctrl-C starts the line again."""
    while True:
        try:
            return input(prompt)
        except EOFError:
            if prompt:
                print()
            return None
        except KeyboardInterrupt:
            if not prompt:
                raise
            print(f"\n{_HELP}", file=sys.stderr)


def _turn(
    runner: asyncio.Runner, client: Client, history: list[ChatMessage], question: str, sampling: SamplingParams
) -> None:
    """One question and its answer. An answer that was stopped stays in the history as far as it came."""
    asked = [*history, ChatMessage(role="user", content=question)]
    pieces: list[str] = []
    cut = ""
    try:
        if runner.run(_answer(client, asked, sampling, pieces, sys.stdout)):
            cut = f"(cut after {sampling.max_tokens} tokens: see --max-tokens)"
    except KeyboardInterrupt:
        pieces, cut = pieces or ["(stopped)"], "(stopped)"
    except RequestError as exc:
        print(f"tandem: {exc.message}", file=sys.stderr)
        return
    finally:
        print(flush=True)
    if cut:
        print(cut, file=sys.stderr)
    history[:] = [*asked, ChatMessage(role="assistant", content="".join(pieces))]


async def _answer(
    client: Client, messages: list[ChatMessage], sampling: SamplingParams, pieces: list[str], out: TextIO
) -> bool:
    """Whether it was cut at its most tokens."""
    stream = client.chat(messages, sampling)
    is_cut = False
    try:
        async for response in stream:
            pieces.append(response.text)
            out.write(response.text)
            out.flush()
            is_cut = response.finish_reason == FINISH_REASON_LENGTH
    finally:
        await stream.aclose()
    return is_cut
