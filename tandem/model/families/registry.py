"""Which families there are."""

from __future__ import annotations

from tandem.model.config_fields import ConfigFields
from tandem.model.families import experts, gemma, llama, qwen
from tandem.model.families.family import Family

_GROUPS = (llama.FAMILIES, qwen.FAMILIES, gemma.FAMILIES, experts.FAMILIES)
_FAMILIES = {family.model_type: family for group in _GROUPS for family in group}


def find_family(config: ConfigFields) -> Family:
    """By `model_type`. Raises ModelLoadError for others, and for another head than a language model's."""
    family = _FAMILIES[config.choice("model_type", sorted(_FAMILIES), "")]
    architectures = config.value("architectures") or [family.architecture]
    if architectures != [family.architecture]:
        raise config.unsupported("architectures", architectures, f"{family.architecture} is")
    return family
