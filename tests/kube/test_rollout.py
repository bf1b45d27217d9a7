"""The next step of rolling updates and changes of size: never fewer pods than allowed, never more, always an end."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kube.rollout import Bounds, PodFacts, Step, deployment_step, recreate_step, stateful_step


def pod(number: int, *, revision: str = "old", available: bool = True, ending: bool = False) -> PodFacts:
    """A pod with a number for its name and ordinal."""
    return PodFacts(
        name=f"pod-{number}", revision=revision, is_available=available, is_ending=ending, ordinal=number
    )


@pytest.mark.parametrize(
    ("replicas", "surge", "unavailable", "bounds"),
    [(4, "25%", "25%", (1, 1)), (3, "25%", "25%", (1, 0)), (1, 1, 0, (1, 0)), (5, 0, 0, (0, 1)), (9, "30%", 2, (3, 2))],
)
def test_shares_are_rounded_so_that_an_update_can_go_on(
    replicas: int, surge: int | str, unavailable: int | str, bounds: tuple[int, int]
) -> None:
    found = Bounds.of(replicas, surge, unavailable)
    assert (found.max_surge, found.max_unavailable) == bounds


@given(
    replicas=st.integers(1, 5),
    num_old=st.integers(0, 5),
    surge=st.integers(0, 2),
    unavailable=st.integers(0, 2),
    data=st.data(),
)
def test_an_update_keeps_its_bounds_and_ends(
    replicas: int, num_old: int, surge: int, unavailable: int, data: st.DataObject
) -> None:
    bounds = Bounds.of(replicas, surge, unavailable)
    pods = [pod(number) for number in range(num_old)]
    for turn in range(100):
        step = deployment_step(pods, replicas=replicas, revision="new", bounds=bounds)
        if step == Step() and all(known.is_available for known in pods):
            break
        before = sum(known.is_available for known in pods)
        pods = [known for known in pods if known.name not in step.end]
        after = sum(known.is_available for known in pods)
        assert after >= min(before, replicas - bounds.max_unavailable)
        pods += [pod(100 * turn + n + 10, revision="new", available=False) for n in range(step.num_new)]
        assert len(pods) <= max(replicas + bounds.max_surge, num_old)
        waiting = [known for known in pods if not known.is_available]
        if waiting:
            chosen = data.draw(st.sampled_from(waiting))
            pods = [replace(known, is_available=True) if known is chosen else known for known in pods]
    assert [known.revision for known in pods] == ["new"] * replicas


def test_old_pods_stay_while_new_ones_are_not_available() -> None:
    pods = [pod(0), pod(1, revision="new", available=False)]
    assert deployment_step(pods, replicas=1, revision="new", bounds=Bounds(max_surge=1, max_unavailable=0)) == Step()


def test_the_strategy_recreate_waits_until_the_old_pods_are_gone() -> None:
    assert recreate_step([pod(0)], replicas=1, revision="new") == Step(end=("pod-0",))
    assert recreate_step([pod(0, available=False, ending=True)], replicas=1, revision="new") == Step()
    assert recreate_step([], replicas=1, revision="new") == Step(num_new=1)


def test_ordinals_come_up_one_after_the_other() -> None:
    assert stateful_step([], replicas=2, revision="old") == Step(new_ordinals=(0,))
    assert stateful_step([pod(0, available=False)], replicas=2, revision="old") == Step()
    assert stateful_step([pod(0)], replicas=2, revision="old") == Step(new_ordinals=(1,))


def test_parallel_ordinals_come_up_and_go_at_once() -> None:
    assert stateful_step([], replicas=2, revision="old", is_parallel=True) == Step(new_ordinals=(0, 1))
    pods = [pod(0), pod(1), pod(2)]
    assert stateful_step(pods, replicas=1, revision="old", is_parallel=True) == Step(end=("pod-2", "pod-1"))


def test_an_update_goes_from_the_highest_ordinal_down_and_waits_for_each() -> None:
    assert stateful_step([pod(0), pod(1)], replicas=2, revision="new") == Step(end=("pod-1",))
    started = pod(1, revision="new", available=False)
    assert stateful_step([pod(0), started], replicas=2, revision="new", is_parallel=True) == Step()
    assert stateful_step([pod(0), pod(1, revision="new")], replicas=2, revision="new") == Step(end=("pod-0",))


def test_a_partition_keeps_lower_ordinals_as_they_are() -> None:
    pods = [pod(0), pod(1, revision="new")]
    assert stateful_step(pods, replicas=2, revision="new", partition=1) == Step()


def test_superfluous_ordinals_go_from_the_top_one_at_a_time() -> None:
    assert stateful_step([pod(0), pod(1), pod(2)], replicas=1, revision="old") == Step(end=("pod-2",))
    pods = [pod(0), pod(1), pod(2, available=False, ending=True)]
    assert stateful_step(pods, replicas=1, revision="old") == Step()
