"""How much a disk tier writes twice: a production trace through the real directory and the real segment log.

A log of segments copies the live blocks of a segment before it deletes it. `writes_per_block` is what reaches the disk
over what was stored: 1 means no copies. Deterministic: no clock is involved and nothing is written. The trace is that
of `benchmarks/eviction.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.eviction import TRACE, Prompt, read_trace
from benchmarks.report import finish
from tandem.kv.eviction import Lrfu
from tandem.kv.prefix_directory import PrefixDirectory
from tandem.kv.segment_log import Place, SegmentLog

SHARES = (0.05, 0.2)
"""Sizes, as shares of all distinct blocks."""
NUM_SEGMENTS = (8, 32, 128)


class Replay:
    """A tier without bytes: every block has size 1, a segment has `num_slots`."""

    def __init__(self, num_segments: int, num_slots: int) -> None:
        self.log = SegmentLog(num_segments * num_slots, num_slots, num_slots)
        self.directory = PrefixDirectory(self.log.max_live, Lrfu())
        self.num_stored = 0
        self.num_copied = 0

    def request(self, prompt: Prompt) -> None:
        """Uses what is there of a prompt and stores the rest, block by block."""
        for end in range(self.directory.use(prompt) + 1, len(prompt) + 1):
            self._make_room()
            place = self.log.reserve(1).place
            admission = self.directory.insert(prompt[:end])
            for name in admission.evicted:
                self.log.forget(name)
            self.num_stored += 1
            if not admission.admitted:
                return
            self.log.settle(admission.admitted[0], place)

    def _make_room(self) -> None:
        for number in self.log.dead():
            self.log.drop(number)
        while not self.log.head_room:
            victim = None if self.log.may_open(for_collection=False) else self.log.victim()
            if victim is None:
                self.log.open(self.log.next_number)
            else:
                self._copy(victim)

    def _copy(self, victim: int) -> None:
        for name in self.log.live(victim):
            if not self.log.head_room:
                self.log.open(self.log.next_number)
            place: Place = self.log.reserve(1).place
            self.log.settle(name, place)
            self.num_copied += 1
        self.log.drop(victim)


def writes_per_block(prompts: Sequence[Prompt], capacity: int, num_segments: int) -> float:
    """Blocks written, copies included, over blocks stored."""
    replay = Replay(num_segments, max(2, capacity // num_segments))
    for prompt in prompts:
        replay.request(prompt)
    return (replay.num_stored + replay.num_copied) / replay.num_stored


def main() -> None:
    """Prints a ratio for each size and number of segments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=TRACE, help=f"the trace (default: {TRACE})")
    parser.add_argument("--quick", action="store_true", help="the default number of segments alone")
    parser.add_argument("--json", type=Path, help="write figures and ratios to this file")
    arguments = parser.parse_args()
    prompts = read_trace(arguments.trace)
    num_distinct = len({name for prompt in prompts for name in prompt})
    ratios = {
        f"writes_per_block_{100 * share:g}_percent_{number}_segments": writes_per_block(
            prompts, int(share * num_distinct), number
        )
        for share in SHARES
        for number in (NUM_SEGMENTS[-1:] if arguments.quick else NUM_SEGMENTS)
    }
    finish(
        {"requests": float(len(prompts)), "distinct blocks": float(num_distinct)}, ratios, arguments.json, "Segments"
    )


if __name__ == "__main__":
    main()
