"""The model's files, its tokenizer, and whether weights and KV pools fit into memory."""

from __future__ import annotations

import time

from cluster.checks.cgroup import memory_available_bytes
from cluster.checks.finding import Finding, Reporter, Settings, size
from tandem.config import ClusterConfig
from tandem.errors import ModelLoadError
from tandem.kv.layout import DTYPE_BYTES
from tandem.model.spec import ModelSpec

PROCESS_BYTES = 450 * 2**20
"""What a worker's process takes beside weights and KV: libraries, threads, activations."""
OTHERS_BYTES = 1200 * 2**20
"""Router, Ray's own processes, the metadata server, the launcher."""
TIGHT = 0.8
"""Share of the available memory above which it is a warning."""


def check_model(settings: Settings) -> list[Finding]:
    """Files found and readable, shape read, tokenizer prepared (it is, here, when it was not), memory enough."""
    from tandem.model.files import resolve_model
    from tandem.model.loader import load_spec

    model = Reporter("model")
    started_s = time.time()
    try:
        files = resolve_model(settings.config.model.source)
        spec = load_spec(files)
    except ModelLoadError as exc:
        return model.problem(exc.message, "set model.source to a model that is here, in a form that is read")
    prepared = (files.tokenizer_dir / "tokenizer.json").stat().st_mtime >= started_s
    stored = sum(path.stat().st_size for path in files.weights)
    found = (
        f"{spec.name}: {files.kind}, {size(stored)} in {len(files.weights)} files, {spec.num_layers} layers, "
        f"{num_parameters(spec) / 1e6:.0f} M parameters; tokenizer {'prepared just now' if prepared else 'prepared'}"
    )
    available = memory_available_bytes(proc_dir=settings.proc_dir, sys_dir=settings.sys_dir)
    return [*model.ok(found), *judge_memory(needed_bytes(spec, settings.config), available)]


def num_parameters(spec: ModelSpec) -> int:
    """Weights, but for biases and the norms of heads."""
    attention = 2 * spec.hidden_size * spec.head_dim * (spec.num_heads + spec.num_kv_heads)
    dense, experts = 3 * spec.hidden_size * spec.intermediate_size, 0
    if spec.experts is not None:
        width = spec.experts.num_experts * spec.experts.intermediate_size
        experts = 3 * spec.hidden_size * width + spec.hidden_size * spec.experts.num_experts
    mlps = sum(experts if layer.has_experts else dense for layer in spec.layers)
    embeddings = spec.vocab_size * spec.hidden_size * (1 if spec.tie_word_embeddings else 2)
    return spec.num_layers * (attention + 2 * spec.hidden_size) + mlps + embeddings + spec.hidden_size


def needed_bytes(spec: ModelSpec, config: ClusterConfig) -> dict[str, int]:
    """Bytes of all workers together, by what they are for."""
    dtype = config.model.kv_dtype(on_gpu=config.model.device == "cuda")
    layout = spec.kv_layout(block_size=config.model.block_size, dtype=dtype)
    prefill, decode = config.prefill, config.decode
    num_workers = prefill.num_workers + decode.num_workers
    num_ranks = prefill.num_workers * prefill.num_ranks + decode.num_workers * decode.num_ranks
    return {
        "weights": num_workers * num_parameters(spec) * DTYPE_BYTES[dtype],
        "KV pools": prefill.num_workers * layout.slab_bytes(prefill.num_blocks)
        + decode.num_workers * layout.slab_bytes(decode.num_blocks),
        "swapped KV": decode.num_workers * layout.slab_bytes(decode.swap_blocks),
        "processes": num_ranks * PROCESS_BYTES + OTHERS_BYTES,
    }


def judge_memory(needed: dict[str, int], available: int) -> list[Finding]:
    """Compares what all workers need, when they run on this host, with what can be had."""
    report = Reporter("memory")
    total = sum(needed.values())
    parts = ", ".join(f"{name} {size(num_bytes)}" for name, num_bytes in needed.items())
    found = f"about {size(total)} needed by all workers ({parts}), {size(available)} available"
    advice = "lower prefill.num_blocks or decode.num_blocks, start fewer workers here, or use bfloat16"
    if total > available:
        return report.problem(found, advice)
    return report.warning(found, advice) if total > TIGHT * available else report.ok(found)
