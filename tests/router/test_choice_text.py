"""One choice's text: stop strings, the fewest tokens before them, calls, and how it ends."""

from __future__ import annotations

from collections.abc import Sequence

from router.choice_text import ChoiceText, StopRules
from router.output import OutputDelta, merged
from router.tool_parser import ToolCallParser
from tandem.types import FinishReason, TokenLogprobs, TokenStep
from tests.router_harness import EOS, tokenizer


def run(text: str, rules: StopRules, *, reason: FinishReason = FinishReason.STOP, tools: bool = False) -> OutputDelta:
    """The whole output of `text` and an end-of-sequence token, or what there is of it when it ends earlier."""
    parser = ToolCallParser(lambda: "id") if tools else None
    choice = ChoiceText(2, tokenizer().detokenizer(), rules, parser)
    ids = [*tokenizer().encode(text), EOS]
    whole = OutputDelta(choice=2)
    for position, token_id in enumerate(ids):
        is_last = position == len(ids) - 1
        step = TokenStep(position=position, token_id=token_id, finish_reason=reason if is_last else None, choice=2)
        whole = merged([whole, choice.accept(step)])
        if whole.finish_reason is not None:
            break
    return whole


def first_tokens(text: str) -> Sequence[int]:
    return tokenizer().encode(text)


def test_a_stop_string_is_cut_off_or_returned_as_asked() -> None:
    cut = run("one two three", StopRules(texts=["two"]))
    kept = run("one two three", StopRules(texts=["two"], is_included=True))
    assert (cut.text, cut.finish_reason) == ("one ", FinishReason.STOP)
    assert (kept.text, kept.token_ids) == ("one two", cut.token_ids)


def test_text_of_the_fewest_tokens_is_no_part_of_a_stop_string() -> None:
    text = "stop one stop two"
    num_first = len(first_tokens("stop"))
    assert run(text, StopRules(texts=["stop"])).text == ""
    assert run(text, StopRules(texts=["stop"], min_tokens=num_first)).text == "stop one "
    assert run(text, StopRules(texts=["stop"], min_tokens=99)).text == text


def test_calls_change_the_finish_reason_of_an_output_that_ended_by_itself_only() -> None:
    text = '<tool_call>[{"name": "f", "arguments": {}}]</tool_call>'
    called = run(text, StopRules(), tools=True)
    assert (called.text, called.finish_reason) == ("", FinishReason.TOOL_CALLS)
    assert run(text, StopRules(), tools=True, reason=FinishReason.LENGTH).finish_reason is FinishReason.LENGTH
    assert run(text, StopRules()).text == text


def test_log_probabilities_stay_with_their_tokens() -> None:
    choice = ChoiceText(0, tokenizer().detokenizer(), StopRules(texts=["zzz"]))
    entry = TokenLogprobs(logprob=-0.5)
    step = TokenStep(position=0, token_id=first_tokens("z")[0], finish_reason=None, logprobs=entry)
    delta = choice.accept(step)
    assert (delta.text, delta.logprobs, len(delta.token_ids)) == ("", (entry,), 1)
