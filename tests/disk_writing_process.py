"""`python -m tests.disk_writing_process DIRECTORY NUM_SEGMENTS SEED`: stores blocks until it is killed.

Says what comes (+) and goes (-), a name a line, once it is so.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from tandem.types import BlockHash
from tests.disk_tiers import chain, make_tier, payloads


def say(added: tuple[BlockHash, ...], removed: tuple[BlockHash, ...]) -> None:
    """One write for each change, so that none is cut in two."""
    lines = [f"-{name.hex()}\n" for name in removed] + [f"+{name.hex()}\n" for name in added]
    sys.stdout.write("".join(lines))
    sys.stdout.flush()


def main() -> None:
    """Prefixes that share beginnings, several puts waiting at any time."""
    directory, num_segments, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rng = random.Random(seed)
    tier = make_tier(directory, num_segments=num_segments, on_change=say)
    waiting = []
    while True:
        text = "".join(rng.choice("abcd") for _ in range(rng.randrange(1, 12)))
        names = chain(f"{rng.randrange(seed + 2)}{text}")
        tier.use(names)
        waiting.append(tier.put(names, payloads(names)))
        if len(waiting) > 4:
            waiting.pop(0).result()


if __name__ == "__main__":
    main()
