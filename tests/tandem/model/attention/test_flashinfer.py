from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.kv.layout import KvLayout
from tandem.model.attention.base import AttentionOptions
from tandem.model.attention.flashinfer import FlashInferAttention, Wrapper
from tandem.model.attention.page_table import padded_decode, page_table
from tandem.model.attention.torch_cpu import TorchAttention
from tandem.model.batch import FlatBatch, build_batch
from tandem.model.executor import SequenceSlice
from tandem.types import BlockId
from tests.gpus import need_gpus

LAYOUT = KvLayout(num_layers=1, num_kv_heads=2, head_dim=64, block_size=4, dtype="bfloat16")


def batch(*shapes: tuple[int, int]) -> FlatBatch:
    """(computed, tokens) each, in blocks of its own."""
    pieces, first = [], 0
    for computed, tokens in shapes:
        count = LAYOUT.num_blocks_for(computed + tokens)
        blocks = [BlockId(i) for i in reversed(range(first, first + count))]
        pieces.append(SequenceSlice(token_ids=[0] * tokens, num_computed=computed, block_ids=blocks))
        first += count
    return build_batch(pieces, LAYOUT, ())


@dataclass
class Recorded:
    """Notes what it is planned with."""

    plans: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    def plan(self, *tables: torch.Tensor | int, **options: object) -> None:
        self.plans.append((tables, options))

    def run(self, query: torch.Tensor, cache: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(query)


@dataclass
class RecordedWrappers:
    prefill: list[Recorded] = field(default_factory=list)
    decode: list[Recorded] = field(default_factory=list)

    def BatchPrefillWithPagedKVCacheWrapper(self, workspace: torch.Tensor, kv_layout: str) -> Wrapper:
        assert kv_layout == "HND"
        self.prefill.append(Recorded())
        return self.prefill[-1]

    def BatchDecodeWithPagedKVCacheWrapper(self, workspace: torch.Tensor, kv_layout: str, **options: Any) -> Wrapper:
        assert kv_layout == "HND"
        assert options == {"use_tensor_cores": False}  # three query heads for each KV head
        self.decode.append(Recorded())
        return self.decode[-1]


def backend(wrappers: RecordedWrappers) -> FlashInferAttention:
    return FlashInferAttention(LAYOUT, 6, device=torch.device("cpu"), wrappers=wrappers)


def lists(tables: tuple[Any, ...]) -> list[Any]:
    return [part.tolist() if isinstance(part, torch.Tensor) else part for part in tables]


def test_a_batch_of_single_tokens_is_planned_for_the_decode_kernel() -> None:
    wrappers = RecordedWrappers()
    backend(wrappers).plan(batch((8, 1), (3, 1)), AttentionOptions(scale=0.125, window=5, softcap=30.0))
    assert not wrappers.prefill
    ((tables, options),) = wrappers.decode[0].plans
    assert lists(tables) == [[0, 3, 4], [2, 1, 0, 3], [1, 4], 6, 2, 64, 4]
    assert (options["sm_scale"], options["window_left"], options["logits_soft_cap"]) == (0.125, 4, 30.0)
    assert "causal" not in options


def test_a_batch_with_a_chunk_is_planned_for_the_causal_prefill_kernel() -> None:
    wrappers = RecordedWrappers()
    backend(wrappers).plan(batch((4, 5), (0, 1)), AttentionOptions(scale=1.0))
    assert not wrappers.decode
    ((tables, options),) = wrappers.prefill[0].plans
    assert lists(tables) == [[0, 5, 6], [0, 3, 4], [2, 1, 0, 3], [1, 1], 6, 2, 64, 4]
    assert (options["causal"], options["window_left"], options["logits_soft_cap"]) == (True, -1, 0.0)


def test_kinds_of_layers_are_planned_apart_and_their_workspaces_kept() -> None:
    wrappers = RecordedWrappers()
    attention = backend(wrappers)
    for _ in range(3):
        attention.plan(batch((8, 1)), AttentionOptions(scale=1.0))
        attention.plan(batch((8, 1)), AttentionOptions(scale=1.0, window=7))
    assert [len(each.plans) for each in wrappers.decode] == [3, 3]


@given(
    shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40)), min_size=1, max_size=5),
    block_size=st.integers(1, 16),
)
def test_a_page_table_finds_every_token_where_the_block_table_has_it(
    shapes: list[tuple[int, int]], block_size: int
) -> None:
    slices = [
        (tokens, tokens + computed, [100 * index + i for i in range(60)])
        for index, (tokens, computed) in enumerate(shapes)
    ]
    table = page_table(slices, block_size)
    for index, (tokens, length, ids) in enumerate(slices):
        blocks = table.blocks[table.offsets[index] : table.offsets[index + 1]]
        assert (len(blocks) - 1) * block_size + table.last_fill[index] == length
        assert [blocks[at // block_size] for at in range(length)] == [ids[at // block_size] for at in range(length)]
        assert table.q_offsets[index + 1] - table.q_offsets[index] == tokens


def test_a_padded_decode_table_reads_one_token_of_the_spare_block() -> None:
    table = padded_decode(page_table([(1, 5, [7, 8])], 4), 3, spare_block=99)
    assert table.is_decode
    assert (table.offsets, table.blocks, table.last_fill) == ((0, 2, 3, 4), (7, 8, 99, 99), (1, 1, 1))


@pytest.mark.gpu
def test_flashinfer_attends_as_torch_does() -> None:
    need_gpus()
    wrappers = pytest.importorskip("flashinfer")
    flat, options = batch((13, 1), (2, 1)), AttentionOptions(scale=0.125)
    layer = torch.randn(6, 2, LAYOUT.num_kv_heads, LAYOUT.block_size, LAYOUT.head_dim, dtype=torch.bfloat16)
    query = torch.randn(2, 6, LAYOUT.head_dim, dtype=torch.bfloat16)
    expected, found = torch.empty_like(query), torch.empty_like(query, device="cuda")
    TorchAttention(LAYOUT).plan(flat, options).attend(query, layer, expected)
    gpu = FlashInferAttention(LAYOUT, 6, device=torch.device("cuda"), wrappers=wrappers)
    gpu.plan(flat, options).attend(query.cuda(), layer.cuda(), found)
    torch.testing.assert_close(found.cpu(), expected, rtol=2e-2, atol=2e-2)
