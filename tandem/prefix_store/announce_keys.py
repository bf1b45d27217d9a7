"""Where announcements of blocks lie in Redis, and how one of them looks there.

Keys (prefix `tandem:{cluster}:kv:{owner}`): itself a stream of batches; `:{tier}` a set of 16-byte names; `:meta` a
hash with the epoch of announcement and the number of the last batch. All live as long as their owner renews them.
An epoch of announcement is one snapshot's: "{owner's epoch}.{count}".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tandem.kv.hashing import HASH_BYTES
from tandem.kv.prefix_index import Batch
from tandem.kv.tiering import Tier
from tandem.types import BlockHash

ANNOUNCED = (Tier.DEVICE, Tier.HOST, Tier.DISK)
"""Tiers whose blocks owners may tell of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnerKeys:
    """The keys of one owner."""

    cluster: str
    owner: str

    @property
    def stream(self) -> str:
        """Its batches."""
        return f"tandem:{self.cluster}:kv:{self.owner}"

    @property
    def meta(self) -> str:
        """Where it stands."""
        return f"{self.stream}:meta"

    def tier(self, tier: str) -> str:
        """What it has in a tier."""
        return f"{self.stream}:{tier}"


def names_in(data: bytes) -> tuple[BlockHash, ...]:
    """Names one after another. Raises ValueError when it is not whole names."""
    if len(data) % HASH_BYTES:
        raise ValueError(f"{len(data)} bytes are not names of {HASH_BYTES} bytes")
    return tuple(BlockHash(data[start : start + HASH_BYTES]) for start in range(0, len(data), HASH_BYTES))


def batch_of(fields: Mapping[bytes, bytes]) -> Batch:
    """A stream's entry as a batch. Raises ValueError for anything else."""
    try:
        return Batch(
            epoch=fields[b"epoch"].decode(),
            seq=int(fields[b"seq"]),
            tier=fields[b"tier"].decode(),
            added=names_in(fields[b"added"]),
            removed=names_in(fields[b"removed"]),
        )
    except KeyError as exc:
        raise ValueError(f"not an announcement: it has no {exc}") from exc


APPLY = """
local meta, stream, set = KEYS[1], KEYS[2], KEYS[3]
local epoch, seq, tier, ttl, longest, added, removed = unpack(ARGV)
local known = redis.call('HMGET', meta, 'epoch', 'seq')
if known[1] ~= epoch or tonumber(known[2]) ~= tonumber(seq) - 1 then return 0 end
local function each(command, data)
  for start = 1, #data, 16000 do
    local names = {}
    for at = start, math.min(start + 15999, #data), 16 do names[#names + 1] = string.sub(data, at, at + 15) end
    redis.call(command, set, unpack(names))
  end
end
each('SADD', added)
each('SREM', removed)
redis.call('HSET', meta, 'seq', seq)
redis.call('XADD', stream, 'MAXLEN', '~', longest, '*',
  'epoch', epoch, 'seq', seq, 'tier', tier, 'added', added, 'removed', removed)
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ttl) end
return 1
"""
"""One batch, whole or not at all: 0 when Redis does not know what came before it."""

RENEW = """
if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then return 0 end
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ARGV[2]) end
return 1
"""
"""Keeps an owner's keys alive; 0 when they are not there, or not this owner's."""
