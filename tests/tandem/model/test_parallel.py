"""A model cut over ranks gives the logits of the whole model, and its ranks meet as often as they must, no more."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.errors import ConfigError
from tandem.model.collectives import Collectives
from tandem.model.files import DEFAULT_MODEL, resolve_model
from tandem.model.gguf_file import GgufFile
from tandem.model.loader import load_spec, load_weights
from tandem.model.micro_batch import micro_batches
from tandem.model.parallel import ModelShard
from tandem.model.spec import ModelSpec, fingerprint
from tandem.model.stage import row_groups
from tests.stages import BLOCK_SIZE, Stages, batches, logits_of
from tests.tiny_families import save_tiny
from tests.tiny_gguf import save_gguf
from tests.tiny_model import save_tiny_llama


@pytest.fixture(scope="module")
def gqa(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("gqa"), num_kv_heads=2)


@pytest.fixture(scope="module")
def mha(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("mha"), num_kv_heads=4, seed=1, tied=True)


def spec_of(model: Path) -> ModelSpec:
    return load_spec(resolve_model(str(model)))


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (4, 1), (1, 2), (2, 2), (1, 3)])
@pytest.mark.parametrize("model_name", ["gqa", "mha"])
def test_ranks_together_give_the_logits_of_one(
    request: pytest.FixtureRequest, model_name: str, tp: int, pp: int
) -> None:
    model: Path = request.getfixturevalue(model_name)
    whole = logits_of(model, tp=1, pp=1)
    cut = logits_of(model, tp=tp, pp=pp)
    assert [len(x) for x in whole] == [1, 32, 1, 2]
    for ours, theirs in zip(cut, whole, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)


def test_ranks_together_give_the_logits_of_one_in_bfloat16(gqa: Path) -> None:
    for ours, theirs in zip(
        logits_of(gqa, tp=2, pp=1, dtype="bfloat16"), logits_of(gqa, tp=1, pp=1, dtype="bfloat16"), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=0.5, rtol=0.05)


@pytest.mark.parametrize(
    ("kind", "tp", "pp"), [("qwen 2", 2, 1), ("gemma 2", 2, 2), ("mixtral", 2, 1), ("qwen 3 moe", 4, 1)]
)
def test_biases_post_norms_windows_and_experts_are_cut_too(
    tmp_path: Path, kind: str, tp: int, pp: int
) -> None:
    model = save_tiny(tmp_path, kind)
    for ours, theirs in zip(logits_of(model, tp=tp, pp=pp), logits_of(model, tp=1, pp=1), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", ["llama 3", "qwen 2"])
def test_ranks_read_their_parts_of_a_gguf_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = save_gguf(tmp_path / "model.gguf", save_tiny(tmp_path / "hf", kind))
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    for ours, theirs in zip(logits_of(path, tp=2, pp=2), logits_of(path, tp=1, pp=1), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)


def test_each_rank_has_some_experts_whole_and_sums_as_often_as_with_a_dense_mlp(tmp_path: Path) -> None:
    model = save_tiny(tmp_path, "mixtral")
    shards = [ModelShard(spec=spec_of(model), tp=2, rank=rank) for rank in (0, 1)]
    assert [list(shard.experts) for shard in shards] == [[0, 1, 2], [3, 4, 5]]
    with Stages(model, tp=2, pp=1) as stages:
        stages.on_all(lambda stage: list(stage.run(batches()[0])))
        assert [count(stage.collectives) for stage in stages.ranks] == [2 * spec_of(model).num_layers + 1] * 2


def count(collectives: Collectives | None) -> int:
    assert collectives is not None
    return collectives.num_all_reduces


def test_a_block_sums_over_the_ranks_exactly_twice_and_embedding_once(gqa: Path) -> None:
    batch = batches()[0]
    with Stages(gqa, tp=2, pp=1) as stages:
        stages.on_all(lambda stage: list(stage.run(batch)))
        assert [count(stage.collectives) for stage in stages.ranks] == [2 * spec_of(gqa).num_layers + 1] * 2


def test_each_rank_reads_and_holds_its_own_slices_only(gqa: Path) -> None:
    files, spec = resolve_model(str(gqa)), spec_of(gqa)
    whole = load_weights(files, spec, "float32")
    halves = [load_weights(files, spec, "float32", ModelShard(spec=spec, tp=2, rank=rank)) for rank in (0, 1)]
    assert sum(half.num_bytes for half in halves) == whole.num_bytes
    stages = [load_weights(files, spec, "float32", ModelShard(spec=spec, pp=2, rank=rank)) for rank in (0, 1)]
    assert [len(stage.layers) for stage in stages] == [1, 2]
    assert [len(stage.embedding) for stage in stages] == [320, 0]
    assert [stage.lm_head.shape[1] for stage in stages] == [0, 320]


def test_parts_of_a_quantized_tensor_are_those_of_the_whole() -> None:
    file = GgufFile(resolve_model(DEFAULT_MODEL).weights[0])
    name = "blk.0.ffn_down.weight"
    whole = file.read(name)
    assert torch.equal(file.read(name, rows=range(100, 300)), whole[100:300])
    assert torch.equal(file.read(name, columns=range(500, 1013)), whole[:, 500:1013])


@pytest.mark.parametrize(("tp", "named"), [(3, "4 attention heads"), (8, "4 attention heads")])
def test_a_model_that_cannot_be_cut_so_says_which_number_does_not_divide(gqa: Path, tp: int, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ModelShard(spec=spec_of(gqa), tp=tp)


def test_more_stages_than_layers_are_refused(gqa: Path) -> None:
    with pytest.raises(ConfigError, match="3 layers"):
        ModelShard(spec=spec_of(gqa), pp=4)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_every_part_of_a_model_is_on_some_rank_and_only_kv_heads_on_several(gqa: Path, tp: int) -> None:
    ranks = [ModelShard(spec=spec_of(gqa), tp=tp, rank=rank) for rank in range(tp)]
    assert [token for rank in ranks for token in rank.vocabulary] == list(range(320))
    assert sum(rank.local.num_heads for rank in ranks) == 4
    held = [head for rank in ranks for head in rank.kv_heads]
    assert held == {1: [0, 1], 2: [0, 1], 4: [0, 0, 1, 1]}[tp]


def test_the_fingerprint_does_not_depend_on_how_a_worker_is_cut(gqa: Path) -> None:
    shards = [ModelShard(spec=spec_of(gqa), tp=tp, pp=pp, rank=tp * pp - 1) for tp, pp in ((1, 1), (2, 1), (4, 3))]
    layouts = [shard.spec.kv_layout(block_size=BLOCK_SIZE, dtype="float32") for shard in shards]
    prints = {fingerprint(shard.spec, layout) for shard, layout in zip(shards, layouts, strict=True)}
    assert len(prints) == 1


@pytest.mark.parametrize("num_parts", [1, 2, 3, 7])
def test_micro_batches_are_the_batch_in_order_and_about_equal(num_parts: int) -> None:
    batch = batches()[0]
    parts = micro_batches(batch, num_parts)
    sizes = [sum(len(piece.token_ids) for piece in part) for part in parts]
    assert len(parts) == min(num_parts, 51 // 16)
    assert max(sizes) - min(sizes) <= 1
    flat = [token for part in parts for piece in part for token in piece.token_ids]
    assert flat == [token for piece in batch for token in piece.token_ids]
    assert sum(bool(piece.choices) for part in parts for piece in part) == 1
    assert parts[-1][-1].choices


def test_a_stage_works_on_a_part_while_the_one_before_it_works_on_the_next(
    gqa: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second_has_begun = threading.Event()
    num_calls: Counter[str] = Counter()

    with Stages(gqa, tp=1, pp=2) as stages:
        first, second = (stage.model.forward for stage in stages.ranks)

        def first_stage(*arguments: Any) -> torch.Tensor:
            num_calls["first"] += 1
            assert num_calls["first"] == 1 or second_has_begun.wait(30.0), "the second stage waits for the whole batch"
            return first(*arguments)

        def second_stage(*arguments: Any) -> torch.Tensor:
            num_calls["second"] += 1
            second_has_begun.set()
            return second(*arguments)

        monkeypatch.setattr(stages.ranks[0].model, "forward", first_stage)
        monkeypatch.setattr(stages.ranks[1].model, "forward", second_stage)
        stages.on_all(lambda stage: list(stage.run(batches()[0])))
    assert num_calls == {"first": 2, "second": 2}


def test_rows_are_what_is_sampled_and_then_what_is_scored() -> None:
    assert row_groups(batches()[0]) == [[50], range(32)]
    assert row_groups(batches()[2]) == [[0, 1]]
