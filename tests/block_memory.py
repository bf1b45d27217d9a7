"""A decode worker's memory as the scheduler's plans use it: a step that reads a wrong or an overwritten token fails.

Each place of a block remembers which token at which context position was written there last. Blocks of a handoff are
overwritten as soon as they are reserved, as a remote writer may do.
"""

from __future__ import annotations

from decode_pool.plan import DecodePlan, Reservation
from tandem.types import BlockId, Request, RequestId

Block = list[tuple[int, int] | None]


class BlockMemory:
    """`history` is every choice's tokens, the prompt's among them, as its owner books them."""

    def __init__(self, block_size: int) -> None:
        self.history: dict[tuple[RequestId, int], list[int]] = {}
        self._block_size = block_size
        self._blocks: dict[BlockId, Block] = {}
        self._slots: dict[BlockId, Block] = {}

    def receive(self, request: Request, reservation: Reservation) -> None:
        """A prompt's KV arrives in the blocks that do not have it; those that do must have it."""
        for index, block in enumerate(reservation.block_ids):
            first = index * self._block_size
            tokens = request.prompt_token_ids[first : first + self._block_size]
            content: Block = [(first + i, token) for i, token in enumerate(tokens)]
            if index < reservation.num_found:
                assert self._blocks[block] == content, "a block was found that holds something else"
            else:
                self._blocks[block] = content + [None] * (self._block_size - len(tokens))

    def run(self, plan: DecodePlan) -> None:
        """What the engine's thread does for a plan, in its order."""
        for swap in plan.ins:
            self._blocks[swap.block] = list(self._slots[swap.slot])
        for swap in plan.outs:
            self._slots[swap.slot] = list(self._blocks[swap.block])
        for copy in plan.copies:
            self._blocks[copy.destination] = list(self._blocks[copy.source])
        for step in plan.steps:
            index, place = divmod(step.num_computed, self._block_size)
            block = self._blocks.setdefault(step.block_ids[index], [None] * self._block_size)
            block[place] = (step.num_computed, step.token_id)
        for step in plan.steps:
            tokens = self.history[step.request.request_id, step.choice]
            assert len(tokens) == step.num_computed + 1, "a token was computed twice, or left out"
            read = [self._blocks[b][i] for b in step.block_ids for i in range(self._block_size)][: len(tokens)]
            assert read == list(enumerate(tokens)), "another token's KV"
