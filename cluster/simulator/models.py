"""Models that can be simulated by name, without their files: shapes as their authors publish them. Pure."""

from __future__ import annotations

from cluster.simulator.cost_model import Experts, ModelCost

LLAMA_2_7B = ModelCost(
    name="llama-2-7b",
    num_parameters=7e9,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    hidden_size=4096,
)
LLAMA_31_8B = ModelCost(
    name="llama-3.1-8b",
    num_parameters=8.03e9,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    hidden_size=4096,
)
LLAMA_31_70B = ModelCost(
    name="llama-3.1-70b",
    num_parameters=70.6e9,
    num_layers=80,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    hidden_size=8192,
)
MIXTRAL_8X7B = ModelCost(
    name="mixtral-8x7b",
    num_parameters=46.7e9,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    hidden_size=4096,
    experts=Experts(num_experts=8, num_chosen=2, parameters_each=32 * 3 * 4096 * 14336),
)
MODELS = {model.name: model for model in (LLAMA_2_7B, LLAMA_31_8B, LLAMA_31_70B, MIXTRAL_8X7B)}
