"""How close the engine comes to its machine, and to vLLM on the same core (`make bench-peers`).

Both sides of every ratio are measured in turns in this run, on the same threads; figures are medians. The ideal prefill
does its arithmetic at the rate at which torch multiplies the model's own shapes; the ideal decode iteration is the
longer of that, and of reading weights and KV once at the rate at which a large maximum reads memory.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch

from benchmarks.engine_subject import BATCHES, CHUNK_TOKENS, CONTEXT_TOKENS, PROMPTS, Engine, ScheduledDecode
from benchmarks.report import finish
from benchmarks.vllm_peer import VllmPeer, why_not

_READ_BYTES = 256 << 20
Figures = dict[str, float]
Action = Callable[[], float]
"""Runs something; how many seconds it took."""


def timed(action: Callable[[], object]) -> Action:
    """`action` by this process's clock."""

    def run() -> float:
        start = time.perf_counter()
        action()
        return time.perf_counter() - start

    return run


def interleaved(actions: dict[str, Action], rounds: int) -> Figures:
    """Median seconds of each action, all of them run once in every round, after one round to warm up."""
    samples: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(rounds + 1):
        for name, action in actions.items():
            elapsed = action()
            if turn:
                samples[name].append(elapsed)
    return {name: median(values) for name, values in samples.items()}


def matmul_action(shapes: Sequence[torch.Size], num_tokens: int) -> tuple[Callable[[], object], float]:
    """A product with each matrix as plain torch does it, contiguous operands; and its floating-point operations."""
    pairs = [(torch.randn(num_tokens, shape[0]), torch.randn(shape)) for shape in shapes]

    def multiply() -> None:
        for x, matrix in pairs:
            torch.mm(x, matrix)

    return multiply, float(sum(2 * num_tokens * shape.numel() for shape in shapes))


def measure_prefill(engine: Engine, vllm: VllmPeer | None, rounds: int) -> tuple[Figures, Figures]:
    """Prompts against the matmul rate at the chunk's number of tokens."""
    multiply, flops = matmul_action(engine.layer_shapes() * 4, CHUNK_TOKENS)
    actions = {"matmul": timed(multiply)}
    for n in PROMPTS:
        actions[f"prefill_{n}"] = timed(partial(engine.prefill, n))
        if vllm is not None:
            actions[f"vllm_prefill_{n}"] = partial(vllm.prefill, n)
    taken = interleaved(actions, rounds)
    peak = flops / taken["matmul"]
    figures, ratios = {"matmul_peak_gflops": peak / 1e9}, {}
    for n in PROMPTS:
        seconds = taken[f"prefill_{n}"]
        figures[f"prefill_{n}_tokens_per_s"] = n / seconds
        figures[f"prefill_{n}_gflops"] = engine.prefill_flops(n) / seconds / 1e9
        ratios[f"prefill_{n}_vs_matmul"] = engine.prefill_flops(n) / seconds / peak
        if vllm is not None:
            figures[f"vllm_prefill_{n}_tokens_per_s"] = n / taken[f"vllm_prefill_{n}"]
            ratios[f"prefill_{n}_vs_vllm"] = taken[f"vllm_prefill_{n}"] / seconds
    return figures, ratios


def measure_decode(engine: Engine, vllm: VllmPeer | None, rounds: int) -> tuple[Figures, Figures]:
    """Iterations against the roofline; largest batch first, because vLLM then prefills its sequences once."""
    memory = torch.ones(_READ_BYTES // 4)
    multiply, flops = matmul_action(engine.layer_shapes() * 4, CHUNK_TOKENS)
    figures: Figures = {}
    ratios: Figures = {}
    for n in sorted(BATCHES, reverse=True):
        actions = {"read": timed(memory.amax), "matmul": timed(multiply)}
        actions["decode"] = timed(partial(engine.decode, n))
        if vllm is not None:
            vllm.hold(n, CONTEXT_TOKENS)
            actions["vllm"] = vllm.step
        taken = interleaved(actions, rounds)
        seconds, bandwidth, rate = taken["decode"], _READ_BYTES / taken["read"], flops / taken["matmul"]
        reading, computing = engine.decode_bytes(n) / bandwidth, engine.decode_flops(n) / rate
        figures[f"decode_{n}_memory_read_gbps"] = bandwidth / 1e9
        figures[f"decode_{n}_matmul_gflops"] = rate / 1e9
        figures[f"decode_{n}_reading_ms"] = reading * 1e3
        figures[f"decode_{n}_computing_ms"] = computing * 1e3
        figures[f"decode_{n}_ms"] = seconds * 1e3
        figures[f"decode_{n}_tokens_per_s"] = n / seconds
        ratios[f"decode_{n}_vs_roofline"] = seconds / max(reading, computing)
        if vllm is not None:
            figures[f"vllm_decode_{n}_ms"] = taken["vllm"] * 1e3
            ratios[f"decode_{n}_vs_vllm"] = taken["vllm"] / seconds
    return figures, ratios


def measure_share(engine: Engine, rounds: int) -> Figures:
    """What of an iteration of the largest batch is scheduling, building the batch, choosing tokens and booking them."""
    n = max(BATCHES)
    scheduled = ScheduledDecode(engine, n, rounds + 1)
    shares = [scheduled.share() for _ in range(rounds + 1)]
    return {f"scheduler_share_{n}": median(shares[1:])}


def _open_vllm(engine: Engine, options: argparse.Namespace, log: Path) -> VllmPeer | None:
    reason = "--no-vllm" if options.no_vllm else why_not()
    if reason is None:
        return VllmPeer(engine.files, options.threads, log)
    print(f"without vLLM: {reason}")
    return None


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--threads", type=int, default=1, help="compute threads (default 1)")
    parser.add_argument("--no-vllm", action="store_true", help="leave vLLM out: it compiles for minutes")
    parser.add_argument("--json", type=Path, help="write figures and ratios to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with torch.inference_mode(), tempfile.TemporaryDirectory() as directory:
        engine = Engine()
        vllm = _open_vllm(engine, options, Path(directory, "vllm.log"))
        figures, ratios = measure_prefill(engine, vllm, 2 if options.quick else 5)
        decode_figures, decode_ratios = measure_decode(engine, vllm, 5 if options.quick else 15)
        shares = measure_share(engine, 5 if options.quick else 15)
        if vllm is not None:
            vllm.close()
    threads = {"num_threads": float(options.threads)}
    title = f"Engine: {engine.spec.name}, fp32"
    finish(threads | figures | decode_figures, ratios | decode_ratios | shares, options.json, title)


if __name__ == "__main__":
    main()
