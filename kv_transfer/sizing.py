"""How many layers travel in one message: the choice between few messages and an early start. Pure.

A message of one layer leaves as soon as that layer is computed, so hardly anything is left to move at the end; but each
message costs the engine and the link some time. Both speeds are measured, so the sum is known for every choice: short
prompts go in one message, long ones in a message for each layer or few layers.
"""

from __future__ import annotations

from dataclasses import dataclass

POST_S = 60e-6
"""What posting one message costs the engine's thread, beside its bytes (benchmarks.transfer: `post_us`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkSpeed:
    """What was measured of a link: bytes per second of large messages, seconds of a small one."""

    bytes_per_s: float
    latency_s: float

    def seconds(self, num_bytes: float) -> float:
        """One message's time on the link."""
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """What is computed and shipped: layers, KV bytes of one of them, and the seconds that one takes to compute."""

    num_layers: int
    layer_bytes: int
    layer_s: float
    later_s: float = 0.0
    """Seconds in which the rest of the prompt is computed: they hide what is not sent by the chunk's end, but for the
    time that the rest's own KV takes."""
    later_bytes: int = 0
    """KV of that rest, all layers."""


def layers_per_message(chunk: Chunk, link: LinkSpeed, *, post_s: float = POST_S) -> int:
    """The number of layers (1 to all) with the least time lost; of equal ones the largest."""
    return min(range(chunk.num_layers, 0, -1), key=lambda size: lost_s(chunk, link, size, post_s=post_s))


def message_layers(chunk: Chunk, link: LinkSpeed | None, *, fixed: int = 0) -> int:
    """Layers in a message of this chunk: `fixed` where that is set, one until both speeds are known, else the best."""
    if fixed:
        return fixed
    if link is None or not chunk.layer_s:
        return 1
    return layers_per_message(chunk, link)


def lost_s(chunk: Chunk, link: LinkSpeed, size: int, *, post_s: float = POST_S) -> float:
    """Seconds that the request loses with messages of `size` layers: to posting, and to KV not moved at the end.

    Where the link cannot keep up with the compute that follows, that hides nothing: what is late stays late.
    """
    groups = layer_groups(chunk.num_layers, size)
    free_s = 0.0
    for first, count in groups:
        ready_s = (first + count) * chunk.layer_s
        free_s = max(free_s, ready_s) + link.seconds(count * chunk.layer_bytes)
    left_s = free_s - chunk.num_layers * chunk.layer_s
    spare_s = max(0.0, chunk.later_s - chunk.later_bytes / link.bytes_per_s)
    return len(groups) * post_s + max(0.0, left_s - spare_s)


def layer_groups(num_layers: int, size: int) -> list[tuple[int, int]]:
    """(first layer, number of layers) of each message: at most `size` layers each, none larger than one before it."""
    num_groups = -(-num_layers // size)
    smaller, num_larger = divmod(num_layers, num_groups)
    groups, first = [], 0
    for index in range(num_groups):
        count = smaller + (index < num_larger)
        groups.append((first, count))
        first += count
    return groups
