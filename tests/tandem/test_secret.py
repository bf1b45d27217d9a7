"""The cluster's key: what is derived from it differs by purpose, and it never shows."""

from __future__ import annotations

import pytest

from tandem.errors import ConfigError
from tandem.secret import ClusterKey, ReplayGuard, joined

KEY = ClusterKey(b"k" * 32)


def test_a_key_survives_its_hex_form_and_does_not_show_in_its_repr() -> None:
    assert ClusterKey.from_hex(f" {KEY.to_hex()}\n") == KEY
    assert KEY.to_hex() not in repr(KEY)
    assert "kkkk" not in repr(KEY)


@pytest.mark.parametrize("text", ["", "00" * 15, "not hex at all, but long enough to be one", "0" * 33])
def test_what_is_no_key_is_refused_without_being_repeated(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ClusterKey.from_hex(text)
    assert not text or text not in refused.value.message


def test_codes_differ_by_key_by_purpose_and_by_where_a_part_ends() -> None:
    codes = {
        KEY.mac("a", [b"xy", b"z"]),
        KEY.mac("b", [b"xy", b"z"]),
        KEY.mac("a", [b"x", b"yz"]),
        ClusterKey(b"l" * 32).mac("a", [b"xy", b"z"]),
    }
    assert len(codes) == 4
    assert joined([b"", b"a"]) != joined([b"a", b""])


def test_a_name_is_used_once_until_it_expires_and_then_forgotten() -> None:
    guard = ReplayGuard()
    assert guard.use(b"late", expires_s=100.0, now=0.0)
    assert guard.use(b"soon", expires_s=10.0, now=0.0)
    assert not guard.use(b"soon", expires_s=10.0, now=9.9)
    assert guard.use(b"other", expires_s=20.0, now=10.0)
    assert len(guard) == 2
    assert not guard.use(b"late", expires_s=100.0, now=99.0)
