"""transformers' answers to the prompts of `tests/prompts.py`, kept in a file, for those who only compare with them.

`tests/tandem/model/test_golden.py` asks transformers about every token of them again. `make golden` writes it anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoTokenizer

from tandem.model.files import DEFAULT_MODEL, ModelFiles, resolve_model
from tandem.model.loader import load_spec
from tests.oracle import Oracle
from tests.prompts import prompt_token_ids

MAX_TOKENS = 16
FILE = Path(__file__).with_suffix(".json")
Prompts = Mapping[str, list[int]]
Answers = dict[str, tuple[int, ...]]


def origin(files: ModelFiles, prompts: Prompts) -> dict[str, str]:
    """What answers depend on: the weights, the version that computes with them, and all that is asked."""
    asked = json.dumps([MAX_TOKENS, dict(prompts)]).encode()
    return {
        "weights": load_spec(files).weights_digest,
        "transformers": transformers.__version__,
        "prompts": hashlib.blake2b(asked, digest_size=16).hexdigest(),
    }


def golden_answers(files: ModelFiles, prompts: Prompts, *, file: Path = FILE) -> Answers:
    """The greedy continuation of each prompt, `MAX_TOKENS` long. Raises AssertionError for those of another origin."""
    kept = json.loads(file.read_text())
    wanted = origin(files, prompts)
    assert kept["origin"] == wanted, f"{file.name} is of {kept['origin']}, wanted is {wanted}: make golden"
    return {name: tuple(tokens) for name, tokens in kept["answers"].items()}


def ask_again(files: ModelFiles, prompts: Prompts) -> dict[str, Any]:
    """The file's content, computed by transformers."""
    oracle = Oracle(files)
    answers = {name: oracle.tokens(ids, MAX_TOKENS) for name, ids in prompts.items()}
    return {"origin": origin(files, prompts), "answers": answers}


def as_text(content: Mapping[str, Any]) -> str:
    """JSON with a line for each answer, so that a change shows which."""
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(ids)}" for name, ids in content["answers"].items())
    return f'{{\n  "origin": {json.dumps(content["origin"])},\n  "answers": {{\n{lines}\n  }}\n}}\n'


def main() -> None:
    """Writes the file again."""
    files = resolve_model(DEFAULT_MODEL)
    prompts = prompt_token_ids(AutoTokenizer.from_pretrained(files.tokenizer_dir))
    FILE.write_text(as_text(ask_again(files, prompts)))


if __name__ == "__main__":
    main()
