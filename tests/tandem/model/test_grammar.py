"""Grammars over a vocabulary: what is allowed, what ends an output, and where compiling happens."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tandem.errors import InvalidRequest
from tandem.model.choice import Choice
from tandem.model.grammar import GrammarCompiler
from tandem.model.logits import shape_logits
from tandem.types import Grammar, GrammarKind, SamplingParams
from tests.tiny_model import VOCAB_SIZE, save_tiny_llama

EOS = 256
AB = Grammar(kind=GrammarKind.REGEX, text="ab*")


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrammarCompiler]:
    directory: Path = save_tiny_llama(tmp_path_factory.mktemp("grammar"), num_kv_heads=2)
    made = GrammarCompiler(directory / "tokenizer.json", vocab_size=VOCAB_SIZE, eos_token_ids=[EOS])
    yield made
    made.close()


def make_choice(compiler: GrammarCompiler, *output: int) -> Choice:
    params = SamplingParams(max_tokens=9, grammar=AB, stop_token_ids=(EOS, 5))
    choice = Choice(params, matcher=compiler.compile_now(AB).matcher(params.stop_token_ids))
    for token_id in output:
        assert choice.append(token_id)
    return choice


def allowed(*choices: Choice) -> list[list[int]]:
    logits = torch.zeros(len(choices), VOCAB_SIZE)
    shape_logits(logits, choices)
    return [row.isfinite().nonzero().flatten().tolist() for row in logits]


A, B = ord("a") - 33, ord("b") - 33
"""The byte tokenizer's ids begin with the printable characters."""


def test_rows_are_masked_each_by_its_own_state_and_others_not_at_all(compiler: GrammarCompiler) -> None:
    plain = Choice(SamplingParams(max_tokens=1))
    first, whole, later = make_choice(compiler), plain, make_choice(compiler, A, B)
    assert allowed(first, whole, later) == [[A], list(range(VOCAB_SIZE)), [B, EOS]]


def test_what_is_not_allowed_is_said_not_to_be(compiler: GrammarCompiler) -> None:
    assert not make_choice(compiler, A).append(A)
    assert make_choice(compiler, A).append(EOS)


def test_a_request_that_could_not_end_is_refused(compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequest) as caught:
        compiler.compile_now(AB).matcher((5,))
    assert caught.value.param == "grammar"


def test_compiling_is_not_on_the_callers_thread(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    compile_now = compiler.compile_now

    def noted(grammar: Grammar) -> object:
        threads.append(threading.current_thread())
        return compile_now(grammar)

    monkeypatch.setattr(compiler, "compile_now", noted)
    assert asyncio.run(compiler.compile(AB)) is not None
    assert asyncio.run(compiler.compile(None)) is None
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()


def test_a_grammar_that_cannot_be_compiled_is_the_requests_fault(compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequest):
        compiler.compile_now(Grammar(kind=GrammarKind.EBNF, text="root ::= nothing"))
