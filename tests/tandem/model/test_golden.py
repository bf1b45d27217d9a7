"""SmolLM2 from GGUF gives transformers' tokens and logits, however its work is cut up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from tandem.model.executor import LayerHook, SequenceSlice, SliceOutput
from tandem.model.files import DEFAULT_MODEL
from tandem.model.sampling import choose
from tandem.model.torch_executor import TorchExecutor
from tandem.types import SamplingParams
from tests.engine_driver import EngineDriver
from tests.golden_answers import MAX_TOKENS
from tests.prompts import CHATS, CHUNK_TOKENS, LENGTHS, TEXTS
from tests.tandem.model.conftest import Golden, make_executor

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first test waits for the oracle
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
NAMES = [*CHATS, *TEXTS, *(f"length_{length}" for length in LENGTHS)]


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one prompt gave by itself: its output, and the logits that the first token came from."""

    tokens: list[int]
    logits: torch.Tensor


class RecordingExecutor:
    """Keeps the logits that each iteration sampled from."""

    def __init__(self, inner: TorchExecutor) -> None:
        self._inner = inner
        self.spec = inner.spec
        self.cache = inner.cache
        self.grammars = inner.grammars
        self.rows: list[torch.Tensor] = []

    def execute(
        self,
        batch: Sequence[SequenceSlice],
        on_layer: LayerHook | None = None,
        before_layer: LayerHook | None = None,
    ) -> list[SliceOutput]:
        logits = self._inner.logits(batch, on_layer)
        self.rows.extend(logits.clone())
        tokens = iter(choose(logits, [piece.choices for piece in batch if piece.choices]))
        return [SliceOutput(tokens=next(tokens) if piece.choices else ()) for piece in batch]


def run_alone(executor: TorchExecutor, prompt: list[int], sampling: SamplingParams, *, chunk_tokens: int) -> Run:
    recording = RecordingExecutor(executor)
    [tokens] = EngineDriver(recording, max_sequences=1, chunk_tokens=chunk_tokens).run([prompt], sampling)
    return Run(tokens=tokens, logits=recording.rows[0])


@pytest.fixture(scope="module")
def alone(smollm2: TorchExecutor, prompts: dict[str, list[int]]) -> dict[str, Run]:
    return {name: run_alone(smollm2, prompts[name], GREEDY, chunk_tokens=CHUNK_TOKENS) for name in NAMES}


def test_there_are_at_least_24_prompts_and_one_of_them_is_longer_than_2000_tokens(
    prompts: dict[str, list[int]],
) -> None:
    assert len(prompts) >= 24
    assert max(len(ids) for ids in prompts.values()) > 2000
    assert min(len(ids) for ids in prompts.values()) == 1


@pytest.mark.parametrize("name", NAMES)
def test_every_token_of_an_answer_that_is_kept_is_the_likeliest_to_transformers(
    name: str, golden: dict[str, Golden]
) -> None:
    assert len(golden[name].tokens) == MAX_TOKENS
    assert golden[name].logits.argmax(dim=-1).tolist() == list(golden[name].tokens)


@pytest.mark.parametrize("name", NAMES)
def test_alone_a_prompt_gives_the_tokens_of_transformers(
    name: str, alone: dict[str, Run], golden: dict[str, Golden]
) -> None:
    assert alone[name].tokens == list(golden[name].tokens)


@pytest.mark.parametrize("name", NAMES)
def test_prefill_logits_are_within_a_thousandth_of_those_of_transformers(
    name: str, alone: dict[str, Run], golden: dict[str, Golden]
) -> None:
    assert (alone[name].logits - golden[name].logits[0]).abs().max() < 1e-3


def test_eight_at_a_time_with_chunked_prefill_they_give_the_tokens_of_transformers(
    smollm2: TorchExecutor, prompts: dict[str, list[int]], golden: dict[str, Golden]
) -> None:
    driver = EngineDriver(smollm2, max_sequences=8, chunk_tokens=200, seed=1)
    outputs = driver.run([prompts[name] for name in NAMES], GREEDY)
    assert dict(zip(NAMES, outputs, strict=True)) == {name: list(golden[name].tokens) for name in NAMES}


@pytest.mark.parametrize("name", ["chat_capital", "code_python", "chinese"])
def test_bf16_logits_stay_close_to_fp32_ones(
    name: str, prompts: dict[str, list[int]], golden: dict[str, Golden], smollm2_bf16: TorchExecutor
) -> None:
    one = replace(GREEDY, max_tokens=1)
    logits = run_alone(smollm2_bf16, prompts[name], one, chunk_tokens=20).logits
    expected = golden[name].logits[0]
    error = (logits - expected).square().mean().sqrt()
    assert error < 0.2 * expected.std()


@pytest.fixture(scope="module")
def smollm2_bf16() -> TorchExecutor:
    return make_executor(DEFAULT_MODEL, num_blocks=40, dtype="bfloat16")
