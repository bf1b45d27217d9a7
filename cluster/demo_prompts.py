"""The five prompts of the demo: chat, code, another language, a short completion, and a long report. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tandem.rpc.tandem.v1.common_pb2 import SamplingParams
from tandem.rpc.tandem.v1.inference_pb2 import ChatMessage

LONG_PROMPT_ENTRIES = 62
"""Entries of the report: at least 1,500 tokens with every tokenizer that has a token or more per word."""
_PLACES = ("harbour", "lighthouse", "ferry dock", "weather station", "north quay", "fish market", "customs house")
_EVENTS = (
    "a crew replaced two worn mooring lines and checked the lamps",
    "the tide gauge was cleaned and read the same as its twin",
    "a delivery of timber arrived early and was stacked under cover",
    "visitors asked about the old bell, which still works",
    "the night watch saw a light on the water and wrote it down",
    "a small leak in the roof was found and closed with new slate",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoPrompt:
    """One request: `text` is continued, `messages` are answered; exactly one of them is given."""

    name: str
    shown: str
    sampling: SamplingParams
    text: str = ""
    messages: tuple[ChatMessage, ...] = ()


def demo_prompts() -> list[DemoPrompt]:
    """Always the same five; greedy or seeded, so that the answers are the same each time."""
    greedy = SamplingParams(temperature=0, max_tokens=48)
    question = "Why does the moon look larger near the horizon? Answer in two sentences."
    french = "Explique en une phrase pourquoi le ciel est bleu."
    code = "def fibonacci(n: int) -> int:\n"
    return [
        _chat("chat", question, SamplingParams(temperature=0.7, seed=7, max_tokens=64)),
        DemoPrompt(name="code", shown=code.strip(), text=code, sampling=SamplingParams(temperature=0, max_tokens=64)),
        _chat("french", french, greedy),
        DemoPrompt(
            name="short",
            shown="The capital of France is",
            text="The capital of France is",
            sampling=SamplingParams(temperature=0, max_tokens=12),
        ),
        _chat("report", long_report(), greedy, shown="(a long report, then) Which places does it mention?"),
    ]


def _chat(name: str, question: str, sampling: SamplingParams, *, shown: str = "") -> DemoPrompt:
    message = ChatMessage(role="user", content=question)
    return DemoPrompt(name=name, shown=shown or question, messages=(message,), sampling=sampling)


def long_report(entries: int = LONG_PROMPT_ENTRIES) -> str:
    """A made-up log of a harbour, with a question at its end; the same text each time."""
    rng = random.Random(1500)
    lines = [
        f"Entry {number}: at the {rng.choice(_PLACES)}, {rng.choice(_EVENTS)}; {rng.randint(2, 40)} boats were counted."
        for number in range(1, entries + 1)
    ]
    return "\n".join(["Log of the harbour office.", *lines, "", "Which places does this log mention? Name three."])
