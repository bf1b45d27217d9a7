"""What `benchmarks.engine` measures: the default model behind its executor and the decode pool's scheduler; its ideal.

Ideals count what must be done: every matrix once for each token, causal attention's two products, and each byte of
weights and KV once for each iteration.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable

import torch

from decode_pool.scheduler import DecodeScheduler
from tandem.kv.cache import KvCache
from tandem.kv.prefix_pool import PrefixPool
from tandem.model.batch import FlatBatch
from tandem.model.choice import Choice
from tandem.model.decoder import Decoder
from tandem.model.executor import LayerHook, SequenceSlice
from tandem.model.files import DEFAULT_MODEL, resolve_model
from tandem.model.loader import load_spec, load_weights
from tandem.model.spec import ModelSpec
from tandem.model.torch_executor import TorchExecutor
from tandem.model.weights import Weights
from tandem.types import BlockId, Request, RequestId, SampledToken, SamplingParams, TokenStep

BLOCK_SIZE = 16
CHUNK_TOKENS = 512
CONTEXT_TOKENS = 512
BATCHES = (1, 8, 32)
PROMPTS = (512, 2048)
_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


def _slab(num_bytes: int) -> torch.Tensor:
    """As Tandem's UCX transport allocates it: private memory in huge pages where the kernel has them."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).zero_()


class Engine:
    """The default model in fp32 with room for the largest batch, and what its ideal costs."""

    def __init__(self) -> None:
        self.files = resolve_model(DEFAULT_MODEL)
        self.spec: ModelSpec = load_spec(self.files)
        self.weights: Weights = load_weights(self.files, self.spec, "float32")
        self.layout = self.spec.kv_layout(block_size=BLOCK_SIZE, dtype="float32")
        self._blocks_each = self.layout.num_blocks_for(max(CONTEXT_TOKENS + 1, *PROMPTS))
        self.num_blocks = max(BATCHES) * self.layout.num_blocks_for(CONTEXT_TOKENS + 1) + self._blocks_each
        self.cache = KvCache(self.layout, self.num_blocks, _slab(self.layout.slab_bytes(self.num_blocks)))
        self.executor = TorchExecutor(
            self.spec, self.weights, self.cache, tokenizer_file=self.files.tokenizer_dir / "tokenizer.json"
        )
        self.shuffled = torch.randperm(self.num_blocks, generator=torch.Generator().manual_seed(0)).tolist()

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

    def layer_shapes(self) -> list[torch.Size]:
        """The four matrices of one layer."""
        return [matrix.shape for matrix in self.weights.layers[0].matrices()]

    def prefill_flops(self, num_tokens: int) -> float:
        """Multiply-adds times two: all layers' matrices, and causal attention's two products."""
        matrices = sum(shape.numel() for shape in self.layer_shapes())
        attention = 2 * num_tokens * num_tokens * self.spec.num_heads * self.spec.head_dim
        return float(self.spec.num_layers * (2 * num_tokens * matrices + attention))

    def decode_flops(self, num_sequences: int) -> float:
        """The same for one iteration, the vocabulary's matrix among them."""
        matrices = sum(matrix.numel() for matrix in self.weights.matrices())
        attention = 2 * (CONTEXT_TOKENS + 1) * self.spec.num_layers * self.spec.num_heads * self.spec.head_dim
        return float(2 * num_sequences * (matrices + attention))

    def decode_bytes(self, num_sequences: int) -> int:
        """Weights once, and the KV of every sequence."""
        weights = sum(matrix.numel() * matrix.element_size() for matrix in self.weights.matrices())
        return weights + num_sequences * (CONTEXT_TOKENS + 1) * self.layout.token_bytes


class _TimedDecoder(Decoder):
    """Notes how long the model's own arithmetic takes."""

    seconds = 0.0

    def forward(
        self,
        batch: FlatBatch,
        on_layer: LayerHook | None = None,
        before_layer: LayerHook | None = None,
        x: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._timed(lambda: super(_TimedDecoder, self).forward(batch, on_layer, before_layer, x))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._timed(lambda: super(_TimedDecoder, self).logits(hidden))

    def _timed(self, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        started = time.perf_counter()
        result = call()
        self.seconds += time.perf_counter() - started
        return result


class ScheduledDecode:
    """`num_sequences` under the decode pool's scheduler; its iterations are those of a decode worker."""

    def __init__(self, engine: Engine, num_sequences: int, max_iterations: int) -> None:
        self._executor = engine.executor
        self._model = _TimedDecoder(engine.spec, engine.weights, engine.cache, engine.executor.stage.attention)
        self._scheduler = DecodeScheduler(
            PrefixPool(engine.num_blocks), block_size=BLOCK_SIZE, max_batch_sequences=num_sequences
        )
        sampling = SamplingParams(max_tokens=max_iterations + 2, temperature=0.0)
        self._choices: dict[RequestId, Choice] = {}
        for index in range(num_sequences):
            name = RequestId(f"{index:032x}")
            self._choices[name] = Choice(sampling, position=1)
            ids = tuple((index + 7 * i) % engine.spec.vocab_size for i in range(CONTEXT_TOKENS))
            self._scheduler.add(
                Request(request_id=name, prompt_token_ids=ids, sampling=sampling, arrival_s=0.0, deadline_s=1e9)
            )
        for name in self._scheduler.reserve():
            self._scheduler.deliver(name, (TokenStep(position=0, token_id=1, finish_reason=None),))

    def share(self) -> float:
        """Runs one iteration: the share of it that is not the model's arithmetic."""
        plain, self._executor.stage.model = self._executor.stage.model, self._model
        self._model.seconds = 0.0
        started = time.perf_counter()
        self._iterate()
        taken = time.perf_counter() - started
        self._executor.stage.model = plain
        return 1.0 - self._model.seconds / taken

    def _iterate(self) -> None:
        plan = self._scheduler.schedule()
        choices = [self._choices[step.request.request_id] for step in plan.steps]
        outputs = self._executor.execute(
            [
                SequenceSlice(
                    token_ids=(step.token_id,),
                    num_computed=step.num_computed,
                    block_ids=step.block_ids,
                    choices=(choice,),
                )
                for step, choice in zip(plan.steps, choices, strict=True)
            ]
        )
        tokens: list[SampledToken] = [output.tokens[0] for output in outputs]
        for choice, token in zip(choices, tokens, strict=True):
            choice.append(token.token_id)
        self._scheduler.commit(plan, tokens)
