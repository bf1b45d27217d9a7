"""Whether a model is there and of a kind that is supported, found out before a start: no weights, no heavy imports.

A GGUF file's header is read when it is loaded: it takes another library to say what it holds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tandem.model.config_fields import ConfigFields
from tandem.model.families.family import Identity
from tandem.model.families.registry import read_config
from tandem.model.parallel import ModelShard
from tandem.model.sources import find_model, read_json

_NOBODY = Identity(name="", eos_token_ids=(), weights_digest="")


def check_model(source: str, cuts: Iterable[tuple[int, int]] = ()) -> None:
    """Raises ModelLoadError that says what is missing or not supported.

    `cuts` are the tensor and pipeline ranks of workers: ConfigError says what of the model they do not divide.
    """
    found = find_model(source)
    if found.kind == "safetensors":
        path = found.directory / "config.json"
        _, spec = read_config(ConfigFields(read_json(path), path), replace(_NOBODY, name=found.name))
        for tp, pp in cuts:
            ModelShard(spec=spec, tp=tp, pp=pp)
