"""Grammars through xgrammar: text to compiled form, cached; and the state of one choice in it.

xgrammar, torch and the tokenizer are read when the first grammar comes: together they take seconds, the router needs
no torch, and most workers see no grammar.
Compiling happens on threads of its own, without Python's lock; see `GrammarCompiler.compile`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from tandem.errors import InvalidRequest
from tandem.types import Grammar, GrammarKind

if TYPE_CHECKING:
    import torch
    import xgrammar

CACHE_BYTES = 256 << 20
"""Compiled grammars kept for reuse."""
MAX_GRAMMAR_CHARS = 200_000
_PARAM = "grammar"
_NUM_THREADS = 2
"""So that one grammar which takes a minute does not hold up all others."""


class TokenMatcher:
    """Where one choice stands in its grammar."""

    def __init__(self, matcher: xgrammar.GrammarMatcher) -> None:
        self._matcher = matcher

    def accept(self, token_id: int) -> bool:
        """Goes on with a token; False when the grammar does not allow it here."""
        return bool(self._matcher.accept_token(token_id))

    def fill(self, bitmask: torch.Tensor, row: int) -> None:
        """Writes which tokens are allowed next into a row of `[rows, ceil(vocab / 32)]` int32, lowest bit first."""
        self._matcher.fill_next_token_bitmask(bitmask, row)


class CompiledGrammar:
    """A grammar over one model's vocabulary; shared by all requests that have it."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, eos_token_ids: Sequence[int]) -> None:
        self._compiled = compiled
        self._eos_token_ids = eos_token_ids

    def matcher(self, stop_token_ids: Collection[int]) -> TokenMatcher:
        """A state at the beginning of an output that ends with one of the model's end-of-sequence tokens.

        Raises InvalidRequest when the request has none of them among its stop tokens: it could not end.
        """
        import xgrammar

        ends = [token_id for token_id in self._eos_token_ids if token_id in stop_token_ids]
        if not ends:
            raise InvalidRequest("a grammar needs the model's end-of-sequence token to end with", param=_PARAM)
        return TokenMatcher(xgrammar.GrammarMatcher(self._compiled, override_stop_tokens=ends))


class GrammarCompiler:
    """Compiles for one model. `eos_token_ids` are what may come when the grammar is complete. Any thread."""

    def __init__(self, tokenizer_file: Path, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._file = tokenizer_file
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._lock = threading.Lock()
        self._compiler: xgrammar.GrammarCompiler | None = None
        self._threads = ThreadPoolExecutor(max_workers=_NUM_THREADS, thread_name_prefix="grammar")

    async def compile(self, grammar: Grammar | None) -> CompiledGrammar | None:
        """`compile_now` on one of the compiler's threads; None for None."""
        if grammar is None:
            return None
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.compile_now, grammar)

    def compile_now(self, grammar: Grammar) -> CompiledGrammar:
        """Takes milliseconds to seconds for a new one. Raises InvalidRequest for one that cannot be compiled."""
        with self._lock:
            compiler = self._compiler = self._compiler or self._load()
        try:
            return CompiledGrammar(_compile(compiler, grammar), self._eos_token_ids)
        except (RuntimeError, ValueError) as exc:
            raise _invalid(exc, _PARAM) from exc

    def close(self) -> None:
        """Ends its threads after what is being compiled; not waited for, because that may take long."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _load(self) -> xgrammar.GrammarCompiler:
        import xgrammar

        tokenizer = Tokenizer.from_file(str(self._file))
        info = _tokenizer_info(tokenizer, self._vocab_size, self._eos_token_ids)
        return xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=CACHE_BYTES)


def check_grammar(grammar: Grammar, *, param: str) -> None:
    """Whether it can be read at all, without any vocabulary. Takes a thread's time. Raises InvalidRequest."""
    import xgrammar

    if len(grammar.text) > MAX_GRAMMAR_CHARS:
        raise InvalidRequest(f"{param} must be at most {MAX_GRAMMAR_CHARS} characters", param=param)
    readers: dict[GrammarKind, Any] = {
        GrammarKind.JSON_SCHEMA: xgrammar.Grammar.from_json_schema,
        GrammarKind.REGEX: xgrammar.Grammar.from_regex,
        GrammarKind.EBNF: xgrammar.Grammar.from_ebnf,
        GrammarKind.STRUCTURAL_TAG: xgrammar.Grammar.from_structural_tag,
    }
    try:
        readers[grammar.kind](grammar.text)
    except (RuntimeError, ValueError) as exc:
        raise _invalid(exc, param) from exc


def _compile(compiler: xgrammar.GrammarCompiler, grammar: Grammar) -> xgrammar.CompiledGrammar:
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        return compiler.compile_json_schema(grammar.text)
    if grammar.kind is GrammarKind.REGEX:
        return compiler.compile_regex(grammar.text)
    if grammar.kind is GrammarKind.EBNF:
        return compiler.compile_grammar(grammar.text)
    return compiler.compile_structural_tag(grammar.text)


def _tokenizer_info(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: list[int]) -> xgrammar.TokenizerInfo:
    """Special tokens stand for no text, so no grammar allows them, but for end-of-sequence tokens at its end."""
    import xgrammar

    special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    vocabulary = [""] * vocab_size
    for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        if token_id < vocab_size and (token_id not in special or token_id in eos_token_ids):
            vocabulary[token_id] = token
    found = xgrammar.TokenizerInfo._detect_metadata_from_hf(tokenizer.to_str())
    return xgrammar.TokenizerInfo(
        vocabulary,
        found["vocab_type"],
        vocab_size=vocab_size,
        stop_token_ids=eos_token_ids,
        add_prefix_space=found["add_prefix_space"],
    )


def _invalid(error: Exception, param: str) -> InvalidRequest:
    """xgrammar's message begins with a time and a place in its own source, which say nothing to a client."""
    text = str(error).strip().rsplit(".cc:", 1)[-1].split(": ", 1)[-1]
    return InvalidRequest(f"{param}: {text}", param=param)
