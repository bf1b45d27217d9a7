"""The smallest engine loop: continuous batching with chunked prefill over shuffled blocks, straight on an executor.

Knows nothing of handoffs and shares nothing: each choice of a request is a prompt of its own here, and what a choice
depends on is made anew from its tokens before each of them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.model.choice import Choice, make_choices
from tandem.model.executor import Executor, Scoring, SequenceSlice, SliceOutput
from tandem.types import BlockId, Request, RequestId, SamplingParams, TokenLogprobs, TokenStep


@dataclass(kw_only=True)
class Answer:
    """What one choice came to."""

    steps: list[TokenStep] = field(default_factory=list)
    prompt_scores: list[TokenLogprobs] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return [step.token_id for step in self.steps]


@dataclass(kw_only=True)
class _Running:
    index: int
    request: Request
    choice: int
    executor: Executor
    num_computed: int = 0
    block_ids: list[BlockId] = field(default_factory=list)
    answer: Answer = field(default_factory=Answer)

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + len(self.answer.steps)

    def next_slice(self, budget: int) -> SequenceSlice:
        start, end = self.num_computed, min(self.num_tokens, self.num_computed + budget)
        tokens = [*self.request.prompt_token_ids, *self.answer.token_ids]
        return SequenceSlice(
            token_ids=tokens[start:end],
            num_computed=start,
            block_ids=self.block_ids,
            choices=[self._replayed()] if end == self.num_tokens else [],
            scoring=self._scoring(start, end),
        )

    def _replayed(self) -> Choice:
        grammar = self.request.sampling.grammar
        compiled = None if grammar is None else self.executor.grammars.compile_now(grammar)
        choice = make_choices(self.request, compiled)[self.choice]
        for token_id in self.answer.token_ids:
            assert choice.append(token_id)
        return choice

    def _scoring(self, start: int, end: int) -> Scoring | None:
        num_top = self.request.sampling.num_prompt_logprobs
        if num_top is None or end > self.num_prompt:
            return None
        return Scoring(targets=self.request.prompt_token_ids[start + 1 : end + 1], num_top=num_top)

    def commit(self, piece: SequenceSlice, output: SliceOutput) -> bool:
        """Whether it is over."""
        self.num_computed += len(piece.token_ids)
        self.answer.prompt_scores += output.scores
        if not output.tokens:
            return False
        position = len(self.answer.steps)
        token = output.tokens[0]
        reason = self.request.sampling.finish_reason(token.token_id, position)
        self.answer.steps.append(
            TokenStep(
                position=position,
                token_id=token.token_id,
                finish_reason=reason,
                choice=self.choice,
                logprobs=token.logprobs,
            )
        )
        return reason is not None


class EngineDriver:
    """Runs prompts to the end. `max_sequences` at a time, at most `chunk_tokens` tokens in one iteration."""

    def __init__(self, executor: Executor, *, max_sequences: int, chunk_tokens: int, seed: int = 0) -> None:
        self._executor = executor
        self._max_sequences = max_sequences
        self._chunk_tokens = chunk_tokens
        self._free = [BlockId(i) for i in range(executor.cache.num_blocks)]
        random.Random(seed).shuffle(self._free)
        self.num_iterations = 0

    def run(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[list[int]]:
        """Each prompt's output, in order of the prompts."""
        return self.run_each([(prompt, sampling) for prompt in prompts])

    def run_each(self, requests: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[list[int]]:
        """Each request's output, in order of the requests."""
        made = [
            Request(
                request_id=RequestId(f"r{i}"),
                prompt_token_ids=tuple(prompt),
                sampling=sampling,
                arrival_s=0.0,
                deadline_s=1e9,
            )
            for i, (prompt, sampling) in enumerate(requests)
        ]
        return [answers[0].token_ids for answers in self.answer(made)]

    def answer(self, requests: Sequence[Request]) -> list[list[Answer]]:
        """Each request's choices, in order of the requests."""
        waiting = [
            _Running(index=i, request=request, choice=choice, executor=self._executor)
            for i, request in enumerate(requests)
            for choice in range(request.num_choices)
        ]
        running: list[_Running] = []
        answers: list[list[Answer]] = [[Answer() for _ in range(r.num_choices)] for r in requests]
        while waiting or running:
            while waiting and len(running) < self._max_sequences:
                running.append(self._admit(waiting.pop(0)))
            for done in self._iterate(running):
                running.remove(done)
                self._free.extend(done.block_ids)
                answers[done.index][done.choice] = done.answer
        return answers

    def _admit(self, sequence: _Running) -> _Running:
        num_tokens = sequence.num_prompt + sequence.request.sampling.max_tokens
        count = self._executor.cache.layout.num_blocks_for(num_tokens)
        assert count <= len(self._free), "the test's cache is too small"
        sequence.block_ids = [self._free.pop() for _ in range(count)]
        return sequence

    def _iterate(self, running: Sequence[_Running]) -> list[_Running]:
        budget, planned = self._chunk_tokens, []
        for sequence in sorted(running, key=lambda s: s.num_tokens - s.num_computed):  # decode tokens first
            if budget:
                planned.append((sequence, sequence.next_slice(budget)))
                budget -= len(planned[-1][1].token_ids)
        outputs = self._executor.execute([piece for _, piece in planned])
        self.num_iterations += 1
        return [s for (s, piece), output in zip(planned, outputs, strict=True) if s.commit(piece, output)]
