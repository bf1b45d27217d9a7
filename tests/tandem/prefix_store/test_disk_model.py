"""Any order of calls to a disk tier, against the directory alone: the same blocks, and always their own bytes."""

from __future__ import annotations

import tempfile
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tandem.kv.eviction import Lru
from tandem.kv.prefix_directory import PrefixDirectory
from tests.disk_tiers import chain, fetch, make_tier, payloads

QUOTAS = {"small": 6}


class DiskTiers(RuleBasedStateMachine):
    """The model is a directory of the same capacity that is told the same in the same order."""

    texts = st.text(alphabet="ab", min_size=1, max_size=7)

    @initialize(num_segments=st.integers(2, 5))
    def start(self, num_segments: int) -> None:
        self._place = tempfile.TemporaryDirectory(prefix="disk-model-")
        self.num_segments = num_segments
        self.open()
        self.model = PrefixDirectory(self.tier.stats().max_blocks, Lru(), quotas=QUOTAS)

    def open(self) -> None:
        self.tier = make_tier(Path(self._place.name), num_segments=self.num_segments, policy=Lru(), quotas=QUOTAS)

    @rule(text=texts, tenant=st.sampled_from(["", "small"]))
    def put(self, text: str, tenant: str) -> None:
        names = chain(text)
        stored = self.tier.put(names, payloads(names), tenant=tenant).result(30)
        self.model.insert(names, tenant=tenant)
        assert stored == self.model.match(names)

    @rule(text=texts)
    def read(self, text: str) -> None:
        assert fetch(self.tier, chain(text)) == self.model.match(chain(text))

    @rule(text=texts)
    def use(self, text: str) -> None:
        assert self.tier.use(chain(text)) == self.model.use(chain(text))

    @rule(text=texts)
    def remove(self, text: str) -> None:
        assert set(self.tier.remove(chain(text)[-1:])) == set(self.model.remove(chain(text)[-1]))

    @rule()
    def clear(self) -> None:
        assert self.tier.clear().result(30) == len(self.model.clear())

    @precondition(lambda self: len(self.model))
    @rule(data=st.data())
    def pin_for_one_put(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.model.names())))
        assert self.tier.pin(name)
        self.model.pin(name)
        self.put("bbbbbb", "")
        self.tier.unpin(name)
        self.model.unpin(name)

    @rule()
    def reopen(self) -> None:
        self.tier.close()
        self.open()

    @invariant()
    def is_sound(self) -> None:
        if hasattr(self, "model"):
            self.tier.check_invariants()
            assert set(self.tier.names()) == set(self.model.names())
            stats = self.tier.stats()
            assert stats.file_bytes <= self.tier._state.log.capacity_bytes

    def teardown(self) -> None:
        if hasattr(self, "model"):
            self.tier.close()
            self._place.cleanup()


TestDiskTiers = DiskTiers.TestCase
TestDiskTiers.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)
