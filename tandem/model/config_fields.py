"""A model's config.json, of which every field is accounted for: read, known not to matter, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.errors import ModelLoadError

IMMATERIAL = frozenset(
    {
        # where the file comes from and who wrote it
        *("_name_or_path", "transformers_version", "unsloth_version", "unsloth_fixed", "transformers.js_config"),
        *("is_llama_config",),
        # precision and implementation, which are the configuration's to choose
        *("torch_dtype", "dtype", "use_cache", "cache_implementation", "_attn_implementation"),
        *("_attn_implementation_autoset", "attn_implementation", "pretraining_tp", "chunk_size_feed_forward"),
        # training only
        *("initializer_range", "attention_dropout", "hidden_dropout", "output_router_logits"),
        *("router_aux_loss_coef", "router_jitter_noise"),
        # tokens that the tokenizer or the request decides about
        *("bos_token_id", "pad_token_id", "tokenizer_class", "sep_token_id", "prefix", "bad_words_ids"),
        # generation, which requests ask for
        *("do_sample", "temperature", "top_k", "top_p", "typical_p", "max_length", "min_length", "num_beams"),
        *("num_beam_groups", "num_return_sequences", "repetition_penalty", "length_penalty", "diversity_penalty"),
        *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "early_stopping", "task_specific_params"),
        # other heads than the language model's
        *("id2label", "label2id", "problem_type", "return_dict", "finetuning_task"),
    }
)
"""Fields that do not change what the model computes for a prompt."""


class ConfigFields:
    """Takes fields out one by one. Every method raises ModelLoadError that names file, field and value."""

    def __init__(self, values: Mapping[str, Any], path: Path, *, within: str = "") -> None:
        """`within` comes before the names of fields in messages."""
        self._values = values
        self._origin = f"{path}: {within}"
        self._path = path
        self._taken: set[str] = set()

    def error(self, what: str) -> ModelLoadError:
        """An error about this file; `what` begins with a field's name."""
        return ModelLoadError(f"{self._origin}{what}")

    def value(self, key: str) -> Any:
        """As it is, None when it is not there."""
        self._taken.add(key)
        return self._values.get(key)

    def ignore(self, *keys: str) -> None:
        """These say nothing in this family."""
        self._taken.update(keys)

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number of `least` or more; without a default it must be there."""
        value = self.value(key)
        value = default if value is None else value
        if value is None:
            raise self.error(f"{key} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(f"{key} must be a whole number of {least} or more, got {value!r}")
        return value

    def optional_integer(self, key: str, default: int | None = None) -> int | None:
        """A whole number, or None where null says so; the default is for a field that is not there."""
        if self._values.get(key, default) is None:
            self.ignore(key)
            return None
        return self.integer(key, default)

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0; without a default it must be there."""
        value = self.value(key)
        value = default if value is None else value
        if value is None:
            raise self.error(f"{key} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.error(f"{key} must be a number above 0, got {value!r}")
        return float(value)

    def optional_number(self, key: str, default: float | None = None) -> float | None:
        """A number, or None where null says so; the default is for a field that is not there."""
        if self._values.get(key, default) is None:
            self.ignore(key)
            return None
        return self.number(key, default)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self.value(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.error(f"{key} must be true or false, got {value!r}")
        return value

    def integers(self, key: str, length: int | None = None) -> list[int] | None:
        """A list of whole numbers, of at least `length`; None when it is not there."""
        value = self.value(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise self.error(f"{key} must be a list of whole numbers, got {value!r}")
        if length is not None and len(value) < length:
            raise self.error(f"{key} has {len(value)} entries, {length} are needed")
        return value

    def choice(self, key: str, allowed: Sequence[str], default: str) -> str:
        """One of the allowed words."""
        value = self.value(key)
        value = default if value is None else value
        if value not in allowed:
            raise self.unsupported(key, value, f"{', '.join(allowed)} {'are' if len(allowed) > 1 else 'is'}")
        return str(value)

    def section(self, key: str) -> ConfigFields | None:
        """An object inside, to be taken apart in the same way; None when it is not there or empty."""
        value = self.value(key)
        if not value:
            return None
        if not isinstance(value, dict):
            raise self.error(f"{key} must be an object, got {value!r}")
        return ConfigFields(value, self._path, within=f"{key}.")

    def unsupported(self, key: str, value: Any, what_is: str = "") -> ModelLoadError:
        """The error for a field whose value is not supported."""
        return self.error(f"{key} {value!r} is not supported" + (f" ({what_is})" if what_is else ""))

    def refuse_rest(self) -> None:
        """What was not taken must not matter: be in the list, or null, false or empty, as whatever is not used is."""
        for key, value in self._values.items():
            neutral = value is None or value is False or value in ("", [], {})
            if key not in self._taken and key not in IMMATERIAL and not neutral:
                raise self.unsupported(key, value)
