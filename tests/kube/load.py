"""Clients that ask a Service again and again while something happens to what is behind it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
import openai

from tandem.rpc.client import open_channel
from tandem.rpc.tandem.v1 import inference_pb2_grpc
from tests.e2e.live import Answer, generate, run

MODEL = "tiny"
PROMPT = "hello"
NUM_TOKENS = 48
_PACE_S = 0.3


@dataclass
class Load:
    """What the clients have seen: an answer for each request, and an error for each that failed."""

    tokens: list[tuple[int, ...]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


async def ask_grpc(endpoint: str, prompt: str = PROMPT, num_tokens: int = NUM_TOKENS) -> tuple[int, ...]:
    """One request over a connection of its own. Raises AioRpcError."""
    async with open_channel(endpoint) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        answer = await generate(stub, prompt, max_tokens=num_tokens, ignore_eos=True)
    return tuple(answer.tokens)


async def ask_at_length(endpoint: str, prompt: list[int], *, salt: str = "") -> Answer:
    """The same of token ids, with all that came back."""
    async with open_channel(endpoint) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        return await generate(stub, prompt, max_tokens=NUM_TOKENS, ignore_eos=True, cache_salt=salt)


def ask_http(client: openai.OpenAI, model: str, prompt: str = PROMPT, num_tokens: int = NUM_TOKENS) -> str:
    """One streamed completion; its text. Raises OpenAIError."""
    steps = client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=num_tokens,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    return "".join(choice.text for step in steps for choice in step.choices)


@contextmanager
def load_on(grpc_endpoint: str, http_url: str, model: str) -> Iterator[Load]:
    """A gRPC client and one of the OpenAI library, while the body runs; their last requests included."""
    load, over = Load(), threading.Event()

    def call_grpc() -> None:
        while not over.wait(_PACE_S):
            try:
                load.tokens.append(run(ask_grpc(grpc_endpoint)))
            except grpc.aio.AioRpcError as exc:
                load.errors.append(f"{exc.code()}: {exc.details()}")

    def call_http() -> None:
        with openai.OpenAI(base_url=f"{http_url}/v1", api_key="none") as client:
            while not over.wait(_PACE_S):
                try:
                    load.texts.append(ask_http(client, model))
                except openai.OpenAIError as exc:
                    load.errors.append(f"{type(exc).__name__}: {exc}")

    clients = [threading.Thread(target=call) for call in (call_grpc, call_http)]
    for client in clients:
        client.start()
    try:
        yield load
    finally:
        over.set()
        for client in clients:
            client.join()
