"""How close the engine comes to its machine: prefill against torch's matmul peak, decode against memory bandwidth.

Both sides of every ratio are measured in turns in this run, on the same threads; figures are medians. The ideal
prefill multiplies the model's own matrices at the peak and does its causal attention at the same rate; the ideal
decode iteration reads the weights and the KV of the batch once, at the rate at which a large sum reads memory.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch

from benchmarks.report import finish
from tandem.kv.cache import KvCache
from tandem.model.choice import Choice
from tandem.model.executor import SequenceSlice
from tandem.model.files import DEFAULT_MODEL, resolve_model
from tandem.model.loader import load_spec, load_weights
from tandem.model.spec import ModelSpec
from tandem.model.torch_executor import TorchExecutor
from tandem.model.weights import Weights
from tandem.types import BlockId, SamplingParams

BLOCK_SIZE = 16
CHUNK_TOKENS = 512
CONTEXT_TOKENS = 512
BATCHES = (1, 8, 32)
PROMPTS = (512, 2048)
_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
_READ_BYTES = 256 << 20


def _seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def interleaved(actions: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each action, all of them run once in every round, after one round to warm up."""
    samples: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(rounds + 1):
        for name, action in actions.items():
            elapsed = _seconds(action)
            if turn:
                samples[name].append(elapsed)
    return {name: median(values) for name, values in samples.items()}


class Engine:
    """The default model in fp32 with room for the largest batch, and what its ideal costs."""

    def __init__(self) -> None:
        files = resolve_model(DEFAULT_MODEL)
        self.spec: ModelSpec = load_spec(files)
        self.weights: Weights = load_weights(files, self.spec, "float32")
        self.layout = self.spec.kv_layout(block_size=BLOCK_SIZE, dtype="float32")
        self._blocks_each = self.layout.num_blocks_for(max(CONTEXT_TOKENS + 1, *PROMPTS))
        num_blocks = max(BATCHES) * self.layout.num_blocks_for(CONTEXT_TOKENS + 1) + self._blocks_each
        slab = torch.zeros(self.layout.slab_bytes(num_blocks), dtype=torch.uint8)
        self.executor = TorchExecutor(
            self.spec,
            self.weights,
            KvCache(self.layout, num_blocks, slab),
            tokenizer_file=files.tokenizer_dir / "tokenizer.json",
        )
        self.shuffled = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).tolist()

    def prefill(self, num_tokens: int) -> None:
        """One prompt in chunks, as a prefill worker runs it."""
        blocks = [BlockId(i) for i in self.shuffled[: self._blocks_each]]
        for start in range(0, num_tokens, CHUNK_TOKENS):
            ids = [(7 * i) % self.spec.vocab_size for i in range(start, min(num_tokens, start + CHUNK_TOKENS))]
            choices = [Choice(_GREEDY)] if start + CHUNK_TOKENS >= num_tokens else []
            self.executor.execute(
                [SequenceSlice(token_ids=ids, num_computed=start, block_ids=blocks, choices=choices)]
            )

    def decode(self, num_sequences: int) -> None:
        """One iteration of `num_sequences`, each with CONTEXT_TOKENS computed."""
        count = self.layout.num_blocks_for(CONTEXT_TOKENS + 1)
        self.executor.execute(
            [
                SequenceSlice(
                    token_ids=[i],
                    num_computed=CONTEXT_TOKENS,
                    block_ids=self.shuffled[i * count : (i + 1) * count],
                    choices=[Choice(_GREEDY)],
                )
                for i in range(num_sequences)
            ]
        )

    def layer_matrices(self) -> list[torch.Tensor]:
        """The four matrices of one layer."""
        return self.weights.layers[0].matrices()

    def prefill_flops(self, num_tokens: int) -> float:
        """Multiply-adds times two: all layers' matrices, and causal attention's two products."""
        matrices = sum(m.shape[0] * m.shape[1] for m in self.layer_matrices())
        attention = 2 * num_tokens * num_tokens * self.spec.num_heads * self.spec.head_dim
        return float(self.spec.num_layers * (2 * num_tokens * matrices + attention))

    def decode_bytes(self, num_sequences: int) -> int:
        """Weights once, and the KV of every sequence."""
        weights = sum(m.numel() * m.element_size() for m in self.weights.matrices())
        return weights + num_sequences * (CONTEXT_TOKENS + 1) * self.layout.token_bytes


def matmul_action(matrices: Sequence[torch.Tensor], num_tokens: int) -> tuple[Callable[[], object], float]:
    """A product with each matrix as plain torch does it, contiguous operands; and its floating-point operations."""
    pairs = [(torch.randn(num_tokens, m.shape[0]), m.contiguous()) for m in matrices]

    def multiply() -> None:
        for x, matrix in pairs:
            torch.mm(x, matrix)

    return multiply, float(sum(2 * num_tokens * m.numel() for _, m in pairs))


def measure_prefill(engine: Engine, rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Prompts against the matmul peak at the chunk's number of tokens."""
    multiply, flops = matmul_action(engine.layer_matrices() * 4, CHUNK_TOKENS)
    actions: dict[str, Callable[[], object]] = {"matmul": multiply}
    for n in PROMPTS:
        actions[f"prefill_{n}"] = partial(engine.prefill, n)
    taken = interleaved(actions, rounds)
    peak = flops / taken["matmul"]
    figures, ratios = {"matmul_peak_gflops": peak / 1e9}, {}
    for n in PROMPTS:
        rate = engine.prefill_flops(n) / taken[f"prefill_{n}"]
        figures[f"prefill_{n}_tokens_per_s"] = n / taken[f"prefill_{n}"]
        figures[f"prefill_{n}_gflops"] = rate / 1e9
        ratios[f"prefill_{n}_vs_matmul"] = rate / peak
    return figures, ratios


def measure_decode(engine: Engine, rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Iterations against reading memory once, and against the larger of that and the matmuls at the same batch."""
    memory = torch.ones(_READ_BYTES // 4)
    actions: dict[str, Callable[[], object]] = {"read": memory.amax}
    flops = {}
    for n in BATCHES:
        actions[f"decode_{n}"] = partial(engine.decode, n)
        actions[f"matmul_{n}"], flops[n] = matmul_action(engine.weights.matrices(), n)
    taken = interleaved(actions, rounds)
    bandwidth = _READ_BYTES / taken["read"]
    figures, ratios = {"memory_read_gbps": bandwidth / 1e9}, {}
    for n in BATCHES:
        iteration, ideal = taken[f"decode_{n}"], engine.decode_bytes(n) / bandwidth
        figures[f"decode_{n}_ms"] = iteration * 1e3
        figures[f"decode_{n}_ideal_ms"] = ideal * 1e3
        figures[f"decode_{n}_matmul_ms"] = taken[f"matmul_{n}"] * 1e3
        figures[f"decode_{n}_tokens_per_s"] = n / iteration
        ratios[f"decode_{n}_vs_roofline"] = iteration / ideal
        ratios[f"decode_{n}_vs_matmul"] = iteration / taken[f"matmul_{n}"]
    return figures, ratios


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--threads", type=int, default=1, help="compute threads (default 1)")
    parser.add_argument("--json", type=Path, help="write figures and ratios to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with torch.inference_mode():
        engine = Engine()
        figures, ratios = measure_prefill(engine, 2 if options.quick else 5)
        decode_figures, decode_ratios = measure_decode(engine, 5 if options.quick else 15)
    threads = {"num_threads": float(options.threads)}
    title = f"Engine: {engine.spec.name}, fp32"
    finish(threads | figures | decode_figures, ratios | decode_ratios, options.json, title)


if __name__ == "__main__":
    main()
