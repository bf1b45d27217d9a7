"""Whatever a request asks for, a pair gives the answer of one engine alone: each feature, and many of them together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from router.grammars import ANY_OBJECT, choice_grammar, ebnf_grammar, regex_grammar, schema_grammar
from router.prompt import Conversation
from router.tools import Tool, ToolUse
from router.validation import SamplingOptions
from tandem.config import TransportName
from tandem.types import FinishReason
from tests.pair import PairOptions, make_prompt
from tests.same_answer import Asked, asking, assert_same, on_both

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
REGEX = regex_grammar("[a-f]{3,5}-[0-9]{2}", param="guided_regex")
CHOICE = choice_grammar(["yes", "yesterday", "no"], param="guided_choice")
EBNF = ebnf_grammar('root ::= item ("," item)*\nitem ::= [0-9] [0-9]', param="guided_grammar")
SCHEMA = schema_grammar(PERSON, param="guided_json")

FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 1.3, "seed": 5},
    "top_k": {"temperature": 1.0, "top_k": 4, "seed": 5},
    "top_p": {"temperature": 1.0, "top_p": 0.6, "seed": 5},
    "min_p": {"temperature": 1.0, "min_p": 0.2, "seed": 5},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": tuple(range(200))},
    "stop": {"stop": ("a", "e", "\ufffd")},
    "include_stop": {"stop": ("a", "e", "\ufffd"), "include_stop_str_in_output": True},
    "stop_token_ids": {"stop_token_ids": tuple(range(0, 250, 3))},
    "ignore_eos": {"ignore_eos": True, "logit_bias": ((256, 100.0),)},
    "eos_first": {"logit_bias": ((256, 100.0),)},
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": 2.0},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "logit_bias": {"logit_bias": ((65, 6.0), (66, -100.0), (3, 5.5))},
    "logprobs": {"logprobs": 5},
    "logprobs_of_shaped_logits": {"logprobs": 2, "repetition_penalty": 2.0, "temperature": 1.5, "seed": 1},
    "logprobs_of_one_token": {"logprobs": 0, "max_tokens": 1},
    "prompt_logprobs": {"prompt_logprobs": 3},
    "n": {"n": 4, "temperature": 1.0, "seed": 9, "logprobs": 1},
    "n_of_one_token": {"n": 3, "temperature": 1.0, "seed": 9, "max_tokens": 1},
    "n_greedy": {"n": 3, "presence_penalty": 1.0, "prompt_logprobs": 0},
    "n_stops": {"n": 5, "temperature": 1.2, "seed": 2, "stop": ("a", "e", "o", "\ufffd")},
    "json_object": {"grammar": ANY_OBJECT, "max_tokens": 40},
    "json_schema": {"grammar": SCHEMA, "max_tokens": 60},
    "regex": {"grammar": REGEX, "temperature": 1.0, "seed": 3, "n": 3},
    "choice": {"grammar": CHOICE, "n": 3, "temperature": 1.5, "seed": 4},
    "ebnf": {"grammar": EBNF, "logprobs": 2, "repetition_penalty": 1.4},
}


@pytest.mark.parametrize("transport", ["shm", "ucx"])
def test_each_feature_gives_the_answer_of_one_engine(gqa: Path, transport: TransportName) -> None:
    asked = [asking(make_prompt(30 + i), **options) for i, options in enumerate(FEATURES.values())]
    options = PairOptions(transport=transport, prefill_blocks=256, decode_blocks=512, max_batch_sequences=32)
    pair, engine = on_both(gqa, asked, options)
    for name, ours, alone in zip(FEATURES, pair, engine, strict=True):
        try:
            assert_same(ours, alone)
        except AssertionError as exc:
            raise AssertionError(f"{name}: {exc}") from exc
    answers = dict(zip(FEATURES, pair, strict=True))
    assert len({choice.token_ids for choice in answers["n"].choices}) == 4
    assert answers["eos_first"].choices[0].finish_reason is FinishReason.STOP
    assert len(answers["ignore_eos"].choices[0].token_ids) == 12
    assert len(answers["min_tokens"].choices[0].token_ids) >= 10
    assert {choice.text for choice in answers["choice"].choices} <= {"yes", "yesterday", "no"}
    assert all(choice.finish_reason is FinishReason.STOP for choice in answers["regex"].choices)


def test_tools_give_the_answer_of_one_engine(gqa: Path) -> None:
    add = Tool(
        name="add",
        parameters={"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}},
    )
    look = Tool(name="look", parameters={"type": "object", "properties": {"at": {"enum": ["a", "b"]}}}, strict=True)
    uses = [
        ToolUse(tools=(add, look), choice="required"),
        ToolUse(tools=(add, look), choice="look"),
        ToolUse(tools=(add, look), choice="auto"),
        ToolUse(tools=(add, look), choice="none"),
    ]
    messages = ({"role": "user", "content": "Hi"},)
    asked = [asking(Conversation(messages=messages, tools=use), max_tokens=100) for use in uses]
    options = PairOptions(prefill_blocks=512, decode_blocks=1024)
    pair, engine = on_both(gqa, asked, options)
    for ours, alone in zip(pair, engine, strict=True):
        assert_same(ours, alone)
    assert [c.name for c in pair[1].choices[0].tool_calls if c.name] == ["look"]
    assert pair[1].choices[0].finish_reason is FinishReason.STOP


def some(*values: object) -> st.SearchStrategy[Any]:
    """One of the values; most often none."""
    return st.sampled_from([None, None, *values])


@st.composite
def requests(draw: st.DrawFn) -> Asked:
    """A prompt and any features together that go together."""
    max_tokens = draw(st.integers(1, 12))
    grammar = draw(some(REGEX, CHOICE, EBNF, SCHEMA))
    given = {
        "temperature": draw(st.sampled_from([0.0, 0.7, 1.0, 1.6])),
        "top_p": draw(some(0.5, 0.9)),
        "top_k": draw(some(1, 3, 20)),
        "min_p": draw(some(0.05, 0.3)),
        "seed": draw(st.integers(0, 2**64 - 1)),
        "n": draw(some(2, 3)),
        "max_tokens": max_tokens,
        "min_tokens": None if grammar else draw(some(1, max_tokens)),
        "ignore_eos": not grammar and draw(st.booleans()),
        "stop": draw(st.sampled_from([(), (), ("a",), ("\ufffd", "1"), ("th", "e", "-")])),
        "include_stop_str_in_output": draw(st.booleans()),
        "stop_token_ids": draw(st.sampled_from([(), (), (1, 50, 100), tuple(range(90))])),
        "presence_penalty": draw(some(-1.0, 1.5)),
        "frequency_penalty": draw(some(-0.5, 1.0)),
        "repetition_penalty": draw(some(0.7, 1.5)),
        "logit_bias": draw(st.sampled_from([(), (), ((256, 4.0),), ((7, 3.0), (256, 3.0), (200, -100.0))])),
        "logprobs": draw(some(0, 3, 20)),
        "prompt_logprobs": draw(some(0, 2)),
        "grammar": grammar,
    }
    prompt = make_prompt(draw(st.integers(1, 70)), seed=draw(st.integers(0, 99)))
    return Asked(prompt=prompt, options=SamplingOptions(**given))


@settings(
    max_examples=8,
    deadline=None,
    phases=(Phase.generate,),  # a smaller example is not worth starting pairs by the hundred
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(requests(), min_size=8, max_size=8))
def test_features_together_give_the_answer_of_one_engine(gqa: Path, asked: list[Asked]) -> None:
    options = PairOptions(prefill_blocks=128, decode_blocks=160)
    for ours, alone in zip(*on_both(gqa, asked, options), strict=True):
        assert_same(ours, alone)
