"""Names of KV blocks: a 128-bit BLAKE2b chain, so that equal names mean equal tokens from the first one on. Pure.

A chain starts at a root that names everything else that KV depends on: weights, tokenizer, block size, precision,
adapter and tenant. Every field is written with its length, and roots and blocks are hashed in separate domains, so no
field can stand for another. Names are the same in every process and for every TP and PP size.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from sys import byteorder

from tandem.types import BlockHash

HASH_BYTES = 16
_ROOT_DOMAIN = b"tandem-kv-root-1"
_BLOCK_DOMAIN = b"tandem-kv-block1"


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheIdentity:
    """What KV depends on besides the tokens. Two requests share blocks only when all of it is equal."""

    fingerprint: str
    """Weights, architecture, precision and block size, as workers publish it."""
    tokenizer: str = ""
    """Revision of the tokenizer: ids of another one mean other texts."""
    adapter: str = ""
    """Name of a LoRA adapter; empty for none."""
    salt: str = ""
    """A tenant's own; requests with different salts share nothing."""


def root_hash(identity: CacheIdentity) -> BlockHash:
    """The parent of every first block under this identity."""
    state = blake2b(digest_size=HASH_BYTES, person=_ROOT_DOMAIN)
    for field in (identity.fingerprint, identity.tokenizer, identity.adapter, identity.salt):
        data = field.encode()
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return BlockHash(state.digest())


def block_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """The name of one full block. Token ids are 0 to 2**32 - 1, hashed as little-endian 32-bit numbers."""
    ids = array("I", token_ids)
    if byteorder == "big":
        ids.byteswap()
    return BlockHash(blake2b(parent + ids.tobytes(), digest_size=HASH_BYTES, person=_BLOCK_DOMAIN).digest())


def chain(root: BlockHash, token_ids: Sequence[int], block_size: int) -> Iterator[BlockHash]:
    """Names of all full blocks, first to last; a remainder has none."""
    parent = root
    for end in range(block_size, len(token_ids) + 1, block_size):
        parent = block_hash(parent, token_ids[end - block_size : end])
        yield parent


def block_hashes(root: BlockHash, token_ids: Sequence[int], block_size: int) -> tuple[BlockHash, ...]:
    """`chain` as a tuple: what travels with a request."""
    return tuple(chain(root, token_ids, block_size))
