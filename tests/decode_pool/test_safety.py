"""The banker's rule against trying every order."""

from __future__ import annotations

from itertools import permutations

import hypothesis.strategies as st
from hypothesis import given, settings

from decode_pool.safety import Claim, is_safe
from tandem.types import BlockId

NAMED = [BlockId(b) for b in range(3)]


def make_claim(own: int, more: int, named: set[BlockId]) -> Claim:
    held = own + len(named)
    return Claim(num_held=held, num_most=held + more, named=tuple(sorted(named)))


CLAIMS = st.builds(make_claim, st.integers(0, 6), st.integers(0, 6), st.sets(st.sampled_from(NAMED)))


def some_order_works(claims: list[Claim], num_free: int) -> bool:
    def works(order: tuple[Claim, ...]) -> bool:
        free = num_free
        for index, claim in enumerate(order):
            if claim.num_most - claim.num_held > free:
                return False
            kept = {block for later in order[index + 1 :] for block in later.named}
            free += claim.num_held - len(kept & set(claim.named))
        return True

    return any(works(order) for order in permutations(claims))


@settings(max_examples=300, deadline=None)
@given(st.lists(CLAIMS, max_size=5), st.integers(0, 10))
def test_a_state_is_safe_when_and_only_when_some_order_lets_all_finish(claims: list[Claim], num_free: int) -> None:
    assert is_safe(claims, num_free) == some_order_works(claims, num_free)


def test_a_block_that_two_hold_comes_back_with_the_last_of_them() -> None:
    claims = [Claim(num_held=2, num_most=2, named=(BlockId(7),)), Claim(num_held=2, num_most=3, named=(BlockId(7),))]
    third = Claim(num_held=0, num_most=3)
    assert is_safe([*claims, third], 0)
    assert not is_safe([*claims, Claim(num_held=0, num_most=4)], 0)
