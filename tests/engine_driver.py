"""The smallest engine loop: continuous batching with chunked prefill over shuffled blocks, straight on an executor."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.model.executor import Executor, SequenceSlice
from tandem.types import BlockId, SamplingParams


@dataclass(kw_only=True)
class _Running:
    index: int
    tokens: list[int]
    num_prompt: int
    sampling: SamplingParams
    num_computed: int = 0
    block_ids: list[BlockId] = field(default_factory=list)

    def next_slice(self, budget: int) -> SequenceSlice:
        end = min(len(self.tokens), self.num_computed + budget)
        return SequenceSlice(
            token_ids=self.tokens[self.num_computed : end],
            num_computed=self.num_computed,
            block_ids=self.block_ids,
            sampling=self.sampling if end == len(self.tokens) else None,
            output_position=len(self.tokens) - self.num_prompt,
        )


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
        waiting = [
            _Running(index=i, tokens=list(prompt), num_prompt=len(prompt), sampling=sampling)
            for i, (prompt, sampling) in enumerate(requests)
        ]
        running: list[_Running] = []
        outputs: list[list[int]] = [[] for _ in requests]
        while waiting or running:
            while waiting and len(running) < self._max_sequences:
                running.append(self._admit(waiting.pop(0)))
            for done in self._iterate(running):
                running.remove(done)
                self._free.extend(done.block_ids)
                outputs[done.index] = done.tokens[done.num_prompt :]
        return outputs

    def _admit(self, sequence: _Running) -> _Running:
        num_tokens = sequence.num_prompt + sequence.sampling.max_tokens
        count = self._executor.cache.layout.num_blocks_for(num_tokens)
        assert count <= len(self._free), "the test's cache is too small"
        sequence.block_ids = [self._free.pop() for _ in range(count)]
        return sequence

    def _iterate(self, running: Sequence[_Running]) -> list[_Running]:
        budget, planned = self._chunk_tokens, []
        for sequence in sorted(running, key=lambda s: len(s.tokens) - s.num_computed):  # decode tokens first
            if budget:
                planned.append((sequence, sequence.next_slice(budget)))
                budget -= len(planned[-1][1].token_ids)
        tokens = self._executor.execute([piece for _, piece in planned])
        self.num_iterations += 1
        return [s for (s, piece), token in zip(planned, tokens, strict=True) if self._commit(s, piece, token)]

    @staticmethod
    def _commit(sequence: _Running, piece: SequenceSlice, token: int | None) -> bool:
        sequence.num_computed += len(piece.token_ids)
        if token is None:
            return False
        position = len(sequence.tokens) - sequence.num_prompt
        sequence.tokens.append(token)
        return sequence.sampling.finish_reason(token, position) is not None
