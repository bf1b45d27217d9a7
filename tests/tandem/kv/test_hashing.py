"""Block names: test vectors that no version may change, and that nothing can be mistaken for something else."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import given

from tandem.kv.hashing import CacheIdentity, block_hash, block_hashes, root_hash

IDENTITY = CacheIdentity(fingerprint="f00d", tokenizer="t1", adapter="", salt="")
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def test_vectors() -> None:
    root = root_hash(IDENTITY)
    assert root.hex() == "6f5a19b17544cdc497164284d9a72d03"
    assert [h.hex() for h in block_hashes(root, list(range(40)), 16)] == [
        "555706d565a202e80eadb2a427df0a00",
        "c279d67bb3a6a08d0e38f5052680cb72",
    ]
    assert block_hash(root, [2**32 - 1]).hex() == "0076ac4c14c42b697dfbb89ed3494c31"
    assert root_hash(replace(IDENTITY, salt="tenant-ü")).hex() == "3e9e48f854b4bfbb813f7de4578ef2dd"


def test_names_do_not_depend_on_the_process() -> None:
    code = (
        "from tandem.kv.hashing import *;"
        "root = root_hash(CacheIdentity(fingerprint='f00d', tokenizer='t1'));"
        "print(block_hashes(root, list(range(32)), 16)[1].hex())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert found == {block_hashes(root_hash(IDENTITY), list(range(32)), 16)[1].hex()}


def test_no_field_of_the_identity_stands_for_another() -> None:
    names = [
        CacheIdentity(fingerprint="a", tokenizer="b"),
        CacheIdentity(fingerprint="ab"),
        CacheIdentity(fingerprint="", tokenizer="ab"),
        CacheIdentity(fingerprint="a", adapter="b"),
        CacheIdentity(fingerprint="a", salt="b"),
    ]
    assert len({root_hash(identity) for identity in names}) == len(names)


def test_a_root_is_not_the_name_of_a_block() -> None:
    root = root_hash(IDENTITY)
    assert block_hash(root, []) != root


@given(first=tokens, second=tokens)
def test_names_are_equal_exactly_as_far_as_the_tokens_are(first: list[int], second: list[int]) -> None:
    root = root_hash(IDENTITY)
    common = 0
    while common < min(len(first), len(second)) and first[common] == second[common]:
        common += 1
    ours, theirs = block_hashes(root, first, 4), block_hashes(root, second, 4)
    assert len(ours) == len(first) // 4
    for index, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        assert (one == other) == (4 * (index + 1) <= common)


@given(ids=tokens)
def test_another_salt_shares_nothing(ids: list[int]) -> None:
    ours = block_hashes(root_hash(IDENTITY), ids, 4)
    theirs = block_hashes(root_hash(replace(IDENTITY, salt="other")), ids, 4)
    assert not set(ours) & set(theirs)
