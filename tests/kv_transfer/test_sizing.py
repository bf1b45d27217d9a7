"""How many layers make a message: few messages where posting costs most, one for each layer where waiting does."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kv_transfer.sizing import Chunk, LinkSpeed, layer_groups, layers_per_message, lost_s

LINK = LinkSpeed(bytes_per_s=12e9, latency_s=50e-6)
BLOCK_LAYER_BYTES = 24_576


def make_chunk(num_blocks: int, *, layer_s: float, later: float = 0.0) -> Chunk:
    """With `later` times as much of the prompt still to come."""
    layer_bytes = num_blocks * BLOCK_LAYER_BYTES
    return Chunk(
        num_layers=30,
        layer_bytes=layer_bytes,
        layer_s=layer_s,
        later_s=30 * layer_s * later,
        later_bytes=int(30 * layer_bytes * later),
    )


def test_a_short_prompt_goes_in_one_message() -> None:
    assert layers_per_message(make_chunk(1, layer_s=1e-3), LINK) == 30


def test_a_long_prompt_goes_layer_by_layer() -> None:
    assert layers_per_message(make_chunk(1024, layer_s=0.1), LINK) == 1


def test_a_chunk_that_is_not_the_last_goes_in_one_message_as_long_as_what_follows_hides_it() -> None:
    assert layers_per_message(make_chunk(32, layer_s=20e-3), LINK) < 30
    assert layers_per_message(make_chunk(32, layer_s=20e-3, later=1.0), LINK) == 30
    assert layers_per_message(make_chunk(32, layer_s=0.5e-3, later=0.002), LINK) < 30


def test_on_a_link_that_cannot_keep_up_no_chunk_waits_for_its_last_layer() -> None:
    slow = LinkSpeed(bytes_per_s=5e8, latency_s=50e-6)
    assert layers_per_message(make_chunk(32, layer_s=1e-3, later=3.0), slow) <= 2


def test_a_slower_link_asks_for_smaller_messages() -> None:
    chunk = make_chunk(16, layer_s=5e-3)
    slow = LinkSpeed(bytes_per_s=5e8, latency_s=50e-6)
    assert layers_per_message(chunk, slow) < layers_per_message(chunk, LINK)


def test_when_nothing_can_hide_the_transfer_only_the_first_start_counts() -> None:
    chunk = make_chunk(64, layer_s=1e-6)
    slow = LinkSpeed(bytes_per_s=1e7, latency_s=1e-3)
    assert lost_s(chunk, slow, 30) == pytest.approx(slow.seconds(30 * chunk.layer_bytes) + 60e-6)


@given(num_layers=st.integers(1, 130), size=st.integers(1, 130))
def test_groups_cover_every_layer_once_and_never_grow(num_layers: int, size: int) -> None:
    groups = layer_groups(num_layers, min(size, num_layers))
    covered = [layer for first, count in groups for layer in range(first, first + count)]
    counts = [count for _, count in groups]
    assert covered == list(range(num_layers))
    assert max(counts) <= size
    assert counts == sorted(counts, reverse=True)


@given(
    num_layers=st.integers(1, 40),
    layer_bytes=st.integers(1, 1 << 26),
    layer_s=st.floats(1e-6, 1.0),
    bytes_per_s=st.floats(1e6, 1e11),
    latency_s=st.floats(1e-6, 0.1),
)
def test_no_other_size_loses_less(
    num_layers: int, layer_bytes: int, layer_s: float, bytes_per_s: float, latency_s: float
) -> None:
    chunk = Chunk(num_layers=num_layers, layer_bytes=layer_bytes, layer_s=layer_s)
    link = LinkSpeed(bytes_per_s=bytes_per_s, latency_s=latency_s)
    chosen = lost_s(chunk, link, layers_per_message(chunk, link))
    assert chosen <= min(lost_s(chunk, link, 1), lost_s(chunk, link, num_layers))
    assert chosen > 0
