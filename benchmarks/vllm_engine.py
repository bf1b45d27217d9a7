"""vLLM on a CPU for `benchmarks.engine`; runs in the environment of `make bench-peers` and imports nothing of Tandem.

    python vllm_engine.py MODEL_DIR     # then commands on standard input, one JSON answer each on standard output

vLLM has its defaults but for fp32, the chunk size that Tandem is measured with, and no prefix cache: prompts repeat.
The engine is stepped in this process, so that a step is one iteration.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

CHUNK_TOKENS = 512


class Stepped:
    """Requests of known lengths in vLLM's engine."""

    def __init__(self, directory: str) -> None:
        from vllm import LLM

        llm = LLM(
            model=directory,
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=2304,
            max_num_batched_tokens=CHUNK_TOKENS,
            max_num_seqs=32,
            enable_prefix_caching=False,
        )
        self._engine = llm.llm_engine
        self._running: list[str] = []
        self._count = 0

    def _add(self, num_tokens: int, max_tokens: int) -> str:
        from vllm import SamplingParams

        self._count += 1
        name = str(self._count)
        ids = [(7 * i) % 49_000 for i in range(num_tokens)]
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        self._engine.add_request(name, {"prompt_token_ids": ids}, params)
        return name

    def prefill(self, num_tokens: int) -> float:
        """Seconds of one prompt, alone, to its first token."""
        self._add(num_tokens, 1)
        started = time.perf_counter()
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return time.perf_counter() - started

    def hold(self, count: int, context: int) -> float:
        """Brings the number of sequences that decode to `count`, new ones with `context` tokens."""
        ended, self._running = self._running[count:], self._running[:count]
        if ended:
            self._engine.abort_request(ended)
        new = [self._add(context, 1024) for _ in range(count - len(self._running))]
        self._running += new
        waiting = set(new)
        while waiting:
            waiting -= {output.request_id for output in self._engine.step() if output.outputs[0].token_ids}
        return 0.0

    def step(self) -> float:
        """Seconds of one iteration of what is held."""
        started = time.perf_counter()
        outputs = self._engine.step()
        elapsed = time.perf_counter() - started
        if len(outputs) != len(self._running):
            raise RuntimeError(f"{len(outputs)} sequences advanced, not {len(self._running)}")
        return elapsed


def main() -> None:
    """Commands: `prefill TOKENS`, `hold COUNT CONTEXT`, `step`; end of input ends it."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM writes to standard output
    try:
        engine = Stepped(sys.argv[1])
    except Exception as exc:
        print(json.dumps({"error": f"{type(exc).__name__}: {exc}"}), file=answers)
        raise
    print(json.dumps({"ok": 0.0}), file=answers)
    for line in sys.stdin:
        command, *arguments = line.split()
        call: Any = {"prefill": engine.prefill, "hold": engine.hold, "step": engine.step}[command]
        try:
            print(json.dumps({"ok": call(*map(int, arguments))}), file=answers)
        except (RuntimeError, ValueError) as exc:
            print(json.dumps({"error": f"{type(exc).__name__}: {exc}"}), file=answers)


if __name__ == "__main__":
    main()
