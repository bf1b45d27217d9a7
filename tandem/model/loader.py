"""From a model's files to its spec and its weights, whichever of the two formats they have."""

from __future__ import annotations

import torch

from tandem.errors import ModelLoadError
from tandem.kv.cache import TORCH_DTYPE
from tandem.kv.layout import Dtype
from tandem.model.device_io import HOST
from tandem.model.files import ModelFiles
from tandem.model.gguf_loader import GgufModel
from tandem.model.parallel import ModelShard
from tandem.model.safetensors_loader import SafetensorsModel
from tandem.model.spec import ModelSpec
from tandem.model.weights import Weights


def _open(files: ModelFiles) -> GgufModel | SafetensorsModel:
    if files.kind == "gguf":
        return GgufModel(files.weights[0], files.name)
    return SafetensorsModel(files.weights, files.name)


def load_spec(files: ModelFiles) -> ModelSpec:
    """The model's shape and fingerprint, from headers and samples; reads no weights. Raises ModelLoadError."""
    return _open(files).spec


def load_weights(
    files: ModelFiles,
    spec: ModelSpec,
    dtype: Dtype,
    shard: ModelShard | None = None,
    *,
    device: torch.device = HOST,
) -> Weights:
    """A rank's weights, or all of them, in `dtype` on `device`, fused for the forward pass.

    Raises ModelLoadError, naming file and tensor.
    """
    model = _open(files)
    if model.spec.weights_digest != spec.weights_digest:
        raise ModelLoadError(f"{files.weights[0]}: the weights changed since the model was opened")
    return model.load(TORCH_DTYPE[dtype], shard or ModelShard(spec=spec), device)
