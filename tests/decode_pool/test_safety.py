"""The banker's rule against trying every order."""

from __future__ import annotations

from itertools import permutations

import hypothesis.strategies as st
from hypothesis import given, settings

from decode_pool.safety import Claim, is_safe

CLAIMS = st.builds(
    lambda held, more: Claim(num_held=held, num_most=held + more), st.integers(0, 6), st.integers(0, 6)
)


def some_order_works(claims: list[Claim], num_free: int) -> bool:
    def works(order: tuple[Claim, ...]) -> bool:
        free = num_free
        for claim in order:
            if claim.num_most - claim.num_held > free:
                return False
            free += claim.num_held
        return True

    return any(works(order) for order in permutations(claims))


@settings(max_examples=300, deadline=None)
@given(st.lists(CLAIMS, max_size=5), st.integers(0, 10))
def test_a_state_is_safe_when_and_only_when_some_order_lets_all_finish(claims: list[Claim], num_free: int) -> None:
    assert is_safe(claims, num_free) == some_order_works(claims, num_free)
