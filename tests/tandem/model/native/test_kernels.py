from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.kv.cache import TORCH_DTYPE
from tandem.kv.layout import Dtype, KvLayout
from tandem.kv.payload_digest import PayloadHasher
from tandem.model.attention.base import AttentionBackend, AttentionOptions
from tandem.model.attention.native import NativeAttention
from tandem.model.attention.torch_cpu import TorchAttention
from tandem.model.batch import build_batch
from tandem.model.executor import SequenceSlice
from tandem.model.linear import project_gated
from tandem.model.native import Kernels, kernels, why_missing
from tandem.model.native.packed import PackedMatrix
from tandem.model.native.rows import HeadNorms, place_heads, rms_norm_rows
from tandem.model.norm import rms_norm
from tandem.model.rope import RotaryFrequencies, rotary_tables, rotate_in_place
from tandem.model.spec import Activation
from tandem.types import BlockId

EPS = 1e-5
TOLERANCE: dict[Dtype, float] = {"float32": 3e-5, "bfloat16": 2e-2}
dtypes = st.sampled_from(list(TOLERANCE))


@pytest.fixture(scope="module")
def own() -> Kernels:
    found = kernels()
    assert found is not None, f"the kernels were not built: {why_missing()}"
    return found


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance)


@settings(max_examples=40, deadline=None)
@given(m=st.integers(1, 70), k=st.integers(1, 90), n=st.integers(1, 75), dtype=dtypes, data=st.data())
def test_a_packed_product_is_the_plain_one(
    own: Kernels, m: int, k: int, n: int, dtype: Dtype, data: st.DataObject
) -> None:
    kind = TORCH_DTYPE[dtype]
    x, matrix = numbers(m, k, dtype=kind), numbers(n, k, seed=1, dtype=kind).t()
    bias = numbers(n, seed=2, dtype=kind) if data.draw(st.booleans()) else None
    residual = numbers(m, n, seed=3, dtype=kind) if data.draw(st.booleans()) else None
    expected = x.double() @ matrix.double()
    expected += 0 if bias is None else bias.double()
    expected += 0 if residual is None else residual.double()
    found = PackedMatrix(own, matrix).multiply(x, bias=bias, residual=residual)
    assert found.dtype == kind
    close(found, expected, TOLERANCE[dtype] * max(1, k**0.5))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("half", [1, 23, 96])
def test_a_gated_product_is_the_activated_gate_times_the_rest(own: Kernels, activation: Activation, half: int) -> None:
    x, matrix = numbers(13, 40), numbers(40, 2 * half, seed=1)
    found = project_gated(x, PackedMatrix(own, matrix, gated=True), activation)
    close(found, project_gated(x.double(), matrix.double(), activation), 1e-4)


def test_a_row_times_a_matrix_does_not_depend_on_the_rows_beside_it(own: Kernels) -> None:
    x, matrix = numbers(64, 576), PackedMatrix(own, numbers(576, 130, seed=1))
    together = matrix.multiply(x)
    for size in (1, 2, 5, 7, 33):
        assert torch.equal(matrix.multiply(x[:size]), together[:size])


def test_a_product_takes_rows_that_lie_apart(own: Kernels) -> None:
    wide, matrix = numbers(9, 64), numbers(32, 20, seed=1)
    close(PackedMatrix(own, matrix).multiply(wide[:, 8:40]), wide[:, 8:40] @ matrix, 1e-4)


def test_products_are_the_same_on_two_threads(own: Kernels) -> None:
    x, matrix = numbers(40, 64), PackedMatrix(own, numbers(64, 200, seed=1))
    alone, threads = matrix.multiply(x), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(matrix.multiply(x), alone)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("size", [1, 7, 64, 100])
def test_the_norm_of_rows_is_torchs(own: Kernels, size: int) -> None:
    x, weight = numbers(5, size), numbers(size, seed=1)
    wide = x.double()
    expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight
    close(rms_norm_rows(own, x, weight, EPS), expected, 1e-5)


@pytest.mark.parametrize("head_dim", [6, 16, 64])
@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize("is_rotated", [False, True])
def test_heads_are_normed_rotated_and_written(own: Kernels, head_dim: int, is_normed: bool, is_rotated: bool) -> None:
    heads, cached = numbers(5, 4 + 2 * 2, head_dim), torch.zeros(3, 2, 2, 4, head_dim)
    weight = numbers(head_dim, seed=1)
    q_norm, k_norm = (weight, weight + 1) if is_normed else (None, None)
    tables = rotary_tables(torch.arange(3, 8), RotaryFrequencies(torch.rand(head_dim // 2))) if is_rotated else None
    rows = torch.randperm(3 * 2 * 2 * 4, generator=torch.Generator().manual_seed(0))[: 5 * 4]
    expected, expected_cache = heads.clone(), cached.clone()
    if q_norm is not None and k_norm is not None:
        for part, norm in ((expected[:, :4], q_norm), (expected[:, 4:6], k_norm)):
            part.copy_(rms_norm(part.double(), norm.double(), EPS))
    if tables is not None:
        rotate_in_place(expected[:, :6], tables)
    expected_cache.view(-1, head_dim)[rows] = expected[:, 4:].reshape(-1, head_dim)
    norms = HeadNorms(q_norm=q_norm, k_norm=k_norm, eps=EPS)
    place_heads(own, heads, norms, tables=tables, cached=cached, kv_rows=rows)
    close(heads, expected, 1e-5)
    close(cached, expected_cache, 1e-5)


def attended(
    backend: AttentionBackend, pieces: Sequence[SequenceSlice], layout: KvLayout, options: AttentionOptions, group: int
) -> torch.Tensor:
    """Over one layer in which all that no slice may read is NaN."""
    dtype = TORCH_DTYPE[layout.dtype]
    num_blocks = max(block for piece in pieces for block in piece.block_ids) + 1
    shape = (num_blocks, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
    layer = torch.full(shape, float("nan"), dtype=dtype)
    for index, piece in enumerate(pieces):
        length = piece.num_computed + len(piece.token_ids)
        values = numbers(length, 2, layout.num_kv_heads, layout.head_dim, seed=index, dtype=dtype)
        for at in range(length):
            layer[piece.block_ids[at // layout.block_size], :, :, at % layout.block_size] = values[at]
    batch = build_batch(pieces, layout, ())
    num_tokens, num_heads = len(batch.token_ids), group * layout.num_kv_heads
    wide = numbers(num_tokens, num_heads + 2 * layout.num_kv_heads, layout.head_dim, seed=99, dtype=dtype)
    output = torch.full((num_tokens, num_heads, layout.head_dim), float("nan"), dtype=dtype)
    backend.plan(batch, options).attend(wide[:, :num_heads], layer, output)
    return output


def slices(shapes: Sequence[tuple[int, int]], block_size: int) -> list[SequenceSlice]:
    """(computed, tokens) each, in blocks that are shuffled, with holes between them."""
    counts = [-(-(computed + tokens) // block_size) for computed, tokens in shapes]
    ids = (3 * torch.randperm(sum(counts), generator=torch.Generator().manual_seed(sum(counts))) + 1).tolist()
    pieces = []
    for (computed, tokens), count in zip(shapes, counts, strict=True):
        blocks, ids = [BlockId(i) for i in ids[:count]], ids[count:]
        pieces.append(SequenceSlice(token_ids=[0] * tokens, num_computed=computed, block_ids=blocks))
    return pieces


lengths = st.tuples(st.integers(0, 70), st.one_of(st.just(1), st.integers(1, 40)))


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(lengths, min_size=1, max_size=4),
    group=st.integers(1, 7),
    num_kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([6, 16, 24, 64, 80]),
    block_size=st.sampled_from([1, 3, 8, 16]),
    window=st.sampled_from([None, 1, 5, 24]),
    softcap=st.sampled_from([None, 4.0]),
    dtype=dtypes,
)
def test_attention_is_torchs_whatever_the_shapes(
    own: Kernels,
    shapes: list[tuple[int, int]],
    group: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    softcap: float | None,
    dtype: Dtype,
) -> None:
    layout = KvLayout(num_layers=1, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype)
    options = AttentionOptions(scale=head_dim**-0.5, window=window, softcap=softcap)
    pieces = slices(shapes, block_size)
    found = attended(NativeAttention(own, layout), pieces, layout, options, group)
    expected = attended(TorchAttention(layout), pieces, layout, options, group)
    close(found, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("shapes", [[(1300, 1), (0, 1), (511, 1)], [(0, 700)], [(900, 300), (255, 2)]])
@pytest.mark.parametrize("window", [None, 300])
def test_attention_goes_over_many_pieces_of_context(
    own: Kernels, shapes: list[tuple[int, int]], window: int | None
) -> None:
    layout = KvLayout(num_layers=1, num_kv_heads=1, head_dim=16, block_size=16, dtype="float32")
    options = AttentionOptions(scale=1.0, window=window)
    pieces = slices(shapes, 16)
    found = attended(NativeAttention(own, layout), pieces, layout, options, 3)
    close(found, attended(TorchAttention(layout), pieces, layout, options, 3), 1e-4)


def test_attention_is_the_same_on_two_threads(own: Kernels) -> None:
    layout = KvLayout(num_layers=1, num_kv_heads=2, head_dim=16, block_size=16, dtype="float32")
    pieces, threads = slices([(40, 1), (0, 300), (9, 1)], 16), torch.get_num_threads()
    backend, options = NativeAttention(own, layout), AttentionOptions(scale=0.25)
    alone = attended(backend, pieces, layout, options, 2)
    torch.set_num_threads(2)
    try:
        assert torch.equal(attended(backend, pieces, layout, options, 2), alone)
    finally:
        torch.set_num_threads(threads)


def test_a_wrong_number_of_arguments_is_refused(own: Kernels) -> None:
    with pytest.raises(TypeError, match="expected 7 arguments, got 2"):
        own.rms_norm(0, 0)


def test_an_argument_of_the_wrong_type_is_refused(own: Kernels) -> None:
    with pytest.raises(TypeError):
        own.rms_norm("x", 0, 0, 0, 0, 1.0, 1)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(
    num_bytes=st.sampled_from([241, 1024, 1025, 1088, 2049, 65_535, 65_536, 65_791, 65_793, 69_632])
    | st.integers(241, 9000)
    | st.integers(65_000, 80_000)
    | st.integers(1 << 20, 1_060_000),
    cuts=st.lists(st.floats(0, 1), max_size=6),
    offsets=st.tuples(st.integers(0, 63), st.sampled_from([0, 64]) | st.integers(0, 63)),
    copying=st.booleans(),
    digesting=st.booleans(),
)
def test_bytes_moved_in_pieces_arrive_and_have_the_digest_of_the_whole(
    own: Kernels, num_bytes: int, cuts: list[float], offsets: tuple[int, int], copying: bool, digesting: bool
) -> None:
    source, target = (torch.zeros(num_bytes + 128, dtype=torch.uint8)[offset:] for offset in offsets)
    source.random_(0, 255)
    bounds = sorted({0, num_bytes, *(int(cut * num_bytes) for cut in cuts)})
    pieces = torch.tensor(
        [
            (target.data_ptr() + start if copying else 0, source.data_ptr() + start, end - start)
            for start, end in pairwise(bounds)
        ]
    )
    found = own.move(pieces.data_ptr(), len(pieces), digesting or not copying)
    hasher = PayloadHasher(num_bytes)
    hasher.update(source[:num_bytes].numpy().data)
    assert found == (hasher.digest() if digesting or not copying else 0)
    assert torch.equal(target[:num_bytes], source[:num_bytes] if copying else torch.zeros_like(source[:num_bytes]))
    assert not target[num_bytes:].any()
