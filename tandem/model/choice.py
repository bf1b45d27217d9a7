"""One choice of a request while it is sampled: what its next token depends on beside the logits.

A function of the request, the choice's index and its tokens so far, so that any worker can make it and go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from tandem.errors import InvalidRequest
from tandem.model.grammar import CompiledGrammar, TokenMatcher
from tandem.model.history import TokenHistory
from tandem.types import Request, SamplingParams, choice_seed


class Choice:
    """Its sampler reads it; its owner appends each token. `sampling.seed` is the choice's own."""

    __slots__ = ("bias_ids", "biases", "history", "is_plain", "matcher", "position", "sampling")

    def __init__(
        self,
        sampling: SamplingParams,
        *,
        position: int = 0,
        history: TokenHistory | None = None,
        matcher: TokenMatcher | None = None,
    ) -> None:
        assert (history is not None) == sampling.needs_history
        assert (matcher is not None) == (sampling.grammar is not None)
        self.sampling = sampling
        self.position = position
        """Output position of the next token."""
        self.history = history
        self.matcher = matcher
        self.is_plain = sampling.is_plain
        self.bias_ids = torch.tensor([token_id for token_id, _ in sampling.logit_bias], dtype=torch.int64)
        self.biases = torch.tensor([bias for _, bias in sampling.logit_bias], dtype=torch.float32)

    @property
    def must_go_on(self) -> bool:
        """Whether the next token must not be a stop token."""
        return self.position < self.sampling.min_tokens and bool(self.sampling.stop_token_ids)

    def append(self, token_id: int) -> bool:
        """The output goes on with a token. False when the grammar does not allow it: then no token was allowed."""
        self.position += 1
        if self.history is not None:
            self.history.append(token_id)
        return self.matcher is None or self.matcher.accept(token_id)


def make_choices(request: Request, grammar: CompiledGrammar | None) -> tuple[Choice, ...]:
    """All choices of a request, before their first token. `grammar` is `request.sampling.grammar`, compiled.

    Raises InvalidRequest for a grammar whose output could not end.
    """
    sampling, histories = request.sampling, _histories(request)
    return tuple(
        Choice(
            replace(sampling, seed=choice_seed(sampling.seed, index)),
            history=history,
            matcher=None if grammar is None else grammar.matcher(sampling.stop_token_ids),
        )
        for index, history in enumerate(histories)
    )


def _histories(request: Request) -> Sequence[TokenHistory | None]:
    if not request.sampling.needs_history:
        return [None] * request.num_choices
    first = TokenHistory(request.prompt_token_ids)
    return [first, *(first.copy() for _ in range(request.num_choices - 1))]


def dead_end() -> InvalidRequest:
    """What a choice ends with whose `append` said that no token was allowed."""
    return InvalidRequest("the grammar allows no token of the model's vocabulary", param="grammar")


def check_token_ids(sampling: SamplingParams, vocab_size: int) -> None:
    """Raises InvalidRequest for a bias or stop token outside the vocabulary, which would be written past the row."""
    biased = [token_id for token_id, _ in sampling.logit_bias]
    for name, token_ids in (("logit_bias", biased), ("stop_token_ids", sampling.stop_token_ids)):
        if token_ids and max(token_ids) >= vocab_size:
            raise InvalidRequest(f"{name}: token ids must be below {vocab_size}, got {max(token_ids)}", param=name)
