"""What the digest of a payload is, in Python: xxh3-64, of long payloads by quarters. Detects damage, not malice.

Four quarters, because one core reads four streams half again as fast as one: the kernel (`model/native/digest.h`) takes
them by turns, in the pass that copies. Who exchanges payloads must agree on this: `layout.PAYLOAD_DIGEST` names it in
every fingerprint.
"""

from __future__ import annotations

from bisect import bisect_right

import xxhash

LANED_BYTES = 64 << 10
"""From here on there are quarters: below, what a core reads ahead on its own is enough."""
_NUM_LANES = 4
_STRIPE_BYTES = 64


class PayloadHasher:
    """Takes the bytes of one payload in order. The GIL is free while hashing."""

    def __init__(self, num_bytes: int) -> None:
        """Of a payload of `num_bytes` bytes."""
        num_lanes = _NUM_LANES if num_bytes >= LANED_BYTES else 1
        each = num_bytes // num_lanes // _STRIPE_BYTES * _STRIPE_BYTES
        self._ends = [*(each * lane for lane in range(1, num_lanes)), num_bytes]
        self._lanes = [xxhash.xxh3_64() for _ in self._ends]
        self._num_taken = 0

    def update(self, view: memoryview) -> None:
        """The next bytes; together they must not be more than was said."""
        while view.nbytes:
            lane = bisect_right(self._ends, self._num_taken)
            part = view[: self._ends[lane] - self._num_taken]
            self._lanes[lane].update(part)
            self._num_taken += part.nbytes
            view = view[part.nbytes :]

    def digest(self) -> int:
        """Of all bytes; never 0, which in a header means "not digested"."""
        if len(self._lanes) == 1:
            return self._lanes[0].intdigest() or 1
        joined = b"".join(lane.intdigest().to_bytes(8, "little") for lane in self._lanes)
        return xxhash.xxh3_64_intdigest(joined) or 1
