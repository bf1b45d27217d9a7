"""Which families there are, and a whole config.json read by the one that it names. Pure."""

from __future__ import annotations

from tandem.model.config_fields import ConfigFields
from tandem.model.families import experts, gemma, llama, qwen
from tandem.model.families.family import Family, Identity
from tandem.model.spec import ModelSpec

_GROUPS = (llama.FAMILIES, qwen.FAMILIES, gemma.FAMILIES, experts.FAMILIES)
FAMILIES = {family.model_type: family for group in _GROUPS for family in group}


def read_config(config: ConfigFields, identity: Identity) -> tuple[Family, ModelSpec]:
    """Accounts for every field. Raises ModelLoadError, naming file, field and value, for what is not supported."""
    family = _find_family(config)
    config.ignore("eos_token_id")  # the identity has them: generation_config.json comes first
    spec = family.read(config, identity)
    config.refuse_rest()
    return family, spec


def _find_family(config: ConfigFields) -> Family:
    """By `model_type`; other heads than a language model's are refused."""
    family = FAMILIES[config.choice("model_type", sorted(FAMILIES), "")]
    architectures = config.value("architectures") or [family.architecture]
    if architectures != [family.architecture]:
        raise config.unsupported("architectures", architectures, f"{family.architecture} is")
    return family
