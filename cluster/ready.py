"""What `tandem up` prints once requests are served: where, how to try it, and what the pools are too small for."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING

from cluster.events import ModelInfo
from cluster.preflight import warn
from tandem.config import ClusterConfig

if TYPE_CHECKING:
    from cluster.cluster_info import ClusterInfo


def print_ready(info: ClusterInfo, config: ClusterConfig) -> None:
    """Endpoints and commands to stdout, warnings to stderr."""
    model = info.model or ModelInfo(name=config.model.served_name, max_context_tokens=0, model_context_tokens=0)
    warn(context_warnings(config, model))
    body = json.dumps({"model": model.name, "prompt": "The capital of France is", "max_tokens": 16, "temperature": 0})
    print(f"ready in {info.total_s:.1f} s: {model.name}, {len(info.workers)} workers")
    print(f"gRPC   {info.grpc}")
    print(f"HTTP   {info.http}")
    print(f"try    curl {info.http}/v1/completions -H 'Content-Type: application/json' -d '{body}'")
    print(f"or     {command_name(sys.argv)} chat --endpoint {info.grpc}", flush=True)


def context_warnings(config: ClusterConfig, model: ModelInfo) -> list[str]:
    """One for the smaller pool when it, not the model, limits how long a request may be."""
    if model.max_context_tokens >= model.model_context_tokens:
        return []
    pools = {"prefill": config.prefill.num_blocks, "decode": config.decode.num_blocks}
    name = min(pools, key=pools.__getitem__)
    return [
        f"{name}.num_blocks x block_size holds {model.max_context_tokens} tokens: longer requests are refused; "
        f"the model could take {model.model_context_tokens}"
    ]


def command_name(argv: Sequence[str]) -> str:
    """How this command was called, so that it can be called again: `tandem`, a path to it, or a module."""
    called = Path(argv[0])
    if called.suffix == ".py":
        return shlex.join([sys.executable, "-m", "cluster.cli"])
    found = which(called.name)
    return called.name if found is not None and Path(found).samefile(called) else shlex.quote(str(called))
