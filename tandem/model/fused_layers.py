"""All layers of a decoder in one call of the kernels, where they are of the kind that it knows.

That kind: fp32 on a CPU, dense MLPs, no norm before the residual is added, every part of the layers in this process.
Its numbers are those of the parts called one by one (`self_attention.py`, `mlp.py`): the same kernels, the same order.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import torch

from tandem.kv.cache import KvCache
from tandem.model.attention.native import NativeAttention
from tandem.model.batch import FlatBatch
from tandem.model.executor import LayerHook
from tandem.model.native import Kernels
from tandem.model.native.packed import ACTIVATIONS, PackedMatrix
from tandem.model.native.room import Room
from tandem.model.spec import ModelSpec
from tandem.model.weights import DenseWeights, LayerWeights, Weights

_LAYER = struct.Struct("=10q3q2d")
_WRITE, _ATTEND = 1, 2


def can_fuse(weights: Weights, cache: KvCache) -> bool:
    """Whether all layers of this rank are of the kind that is meant; it must hold all heads of them."""
    if not cache.slab.is_cpu or cache.layout.dtype != "float32" or not weights.layers:
        return False
    return all(_is_plain(layer) for layer in weights.layers)


def _is_plain(layer: LayerWeights) -> bool:
    if not isinstance(layer.mlp, DenseWeights) or layer.attention.post_norm is not None:
        return False
    are_packed = all(isinstance(m, PackedMatrix) and m.dtype == torch.float32 for m in layer.matrices())
    return are_packed and layer.mlp_post_norm is None


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class FusedLayers:
    """The layers of `weights`, for which `can_fuse` is true, bound to their cache. `spec` has this rank's numbers."""

    def __init__(
        self, kernels: Kernels, spec: ModelSpec, weights: Weights, *, cache: KvCache, attention: NativeAttention
    ) -> None:
        self._kernels = kernels
        self._spec = spec
        self._attention = attention
        self._num_layers = len(weights.layers)
        self._kept: list[torch.Tensor] = []
        assert _LAYER.size == kernels.LAYER_BYTES
        rows = [self._packed(index, layer, cache) for index, layer in enumerate(weights.layers)]
        self._table = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8)
        first = weights.layers[0].mlp
        assert isinstance(first, DenseWeights)
        self._intermediate = first.down.shape[0]
        self._room = Room()

    def _packed(self, index: int, layer: LayerWeights, cache: KvCache) -> bytes:
        attention, mlp, kind = layer.attention, layer.mlp, self._spec.layers[index]
        assert isinstance(mlp, DenseWeights)
        bias = None if attention.qkv_bias is None else attention.qkv_bias.float()
        numbers = [attention.norm, attention.q_norm, attention.k_norm, cache.layers[index], layer.mlp_norm, bias]
        self._kept += [each for each in numbers if each is not None]
        qkv, output, gate_up, down = (_packed_address(m) for m in layer.matrices())
        return _LAYER.pack(
            _address(attention.norm),
            qkv,
            _address(bias),
            _address(attention.q_norm),
            _address(attention.k_norm),
            _address(cache.layers[index]),
            output,
            _address(layer.mlp_norm),
            gate_up,
            down,
            -1 if kind.rope is None else kind.rope,
            ACTIVATIONS[self._spec.activation],
            kind.window or 0,
            self._spec.attention_scale,
            self._spec.attention_softcap or 0.0,
        )

    def run(
        self,
        x: torch.Tensor,
        batch: FlatBatch,
        on_layer: LayerHook | None = None,
        before_layer: LayerHook | None = None,
    ) -> torch.Tensor:
        """As `Decoder.forward`; `x` `[num_tokens, hidden]`, contiguous fp32, is overwritten with what is returned."""
        step = self._step(x, batch)
        for first, end, halves in self._calls(on_layer, before_layer):
            self._kernels.run_layers(*step.arguments, self._table.data_ptr(), first, end, halves)
        return x

    def _calls(
        self, on_layer: LayerHook | None, before_layer: LayerHook | None
    ) -> Iterator[tuple[int, int, int]]:
        """First layer, end and halves of each call; hooks are called in between."""
        if on_layer is None and before_layer is None:
            yield 0, self._num_layers, _WRITE | _ATTEND
            return
        for index in range(self._num_layers):
            if before_layer is not None:
                before_layer(index)
            yield index, index + 1, _WRITE
            if on_layer is not None:
                on_layer(index)
            yield index, index + 1, _ATTEND

    def _step(self, x: torch.Tensor, batch: FlatBatch) -> _Step:
        spec, pages = self._spec, self._attention.pages(batch)
        assert x.is_contiguous()
        positions = torch.tensor([_address(t) for kind in batch.rotary for t in kind], dtype=torch.int64)
        sizes = (
            pages.num_slices,
            len(x),
            spec.hidden_size,
            self._intermediate,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            self._attention.layout.block_size,
            spec.rms_norm_eps,
            torch.get_num_threads(),
        )
        shared = (_address(batch.kv_rows), _address(pages.slices), _address(pages.tables), *sizes)
        work = self._room.take(self._kernels.step_floats(_address(x), 0, _address(positions), *shared))
        arguments = (_address(x), _address(work), _address(positions), *shared)
        return _Step(arguments, (x, batch, pages, positions, work))


class _Step:
    """Arguments of one iteration, and what must stay alive while they are used."""

    def __init__(self, arguments: tuple[float, ...], kept: tuple[object, ...]) -> None:
        self.arguments = arguments
        self._kept = kept


def _packed_address(matrix: object) -> int:
    assert isinstance(matrix, PackedMatrix)
    return matrix.address
