"""Small clusters to simulate: a model of 4 layers on a device whose times are easy to reckon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.simulator.cost_model import DeviceSpec, ModelCost
from cluster.simulator.plant import Plant
from cluster.simulator.workload import Arrival
from cluster.simulator.world import Outcome, World
from kv_transfer.sizing import LinkSpeed
from tandem.config import from_mapping

NUM_LAYERS = 4
TOKEN_S = 1e-3
"""Of prefill, all layers."""
MODEL = ModelCost(
    name="tiny", num_parameters=1e6, num_layers=NUM_LAYERS, num_heads=1, num_kv_heads=1, head_dim=64, hidden_size=64
)
DEVICE = DeviceSpec(
    name="slow",
    flops_per_s=2 * MODEL.num_parameters / TOKEN_S,
    bytes_per_s=1e12,
    memory_bytes=1e9,
    host_bytes_per_s=1e9,
    peer_bytes_per_s=1e9,
)
FAST = LinkSpeed(bytes_per_s=1e12, latency_s=1e-9)
BLOCK_SIZE = 16
CONTROL_S = 0.5


def make_plant(*, link: LinkSpeed = FAST, control_s: float = CONTROL_S, **sections: Mapping[str, Any]) -> Plant:
    """One worker of each pool, chunks of 512 tokens; `sections` are the configuration's."""
    config = from_mapping({"model": {"block_size": BLOCK_SIZE}, **sections})
    return Plant(model=MODEL, device=DEVICE, link=link, config=config, control_s=control_s)


def make_arrival(at_s: float = 0.0, *, prompt: int = 64, output: int = 4, ids: Sequence[int] = ()) -> Arrival:
    return Arrival(at_s=at_s, num_prompt_tokens=prompt, num_output_tokens=output, prefix_ids=tuple(ids))


def simulate(plant: Plant, *arrivals: Arrival, is_colocated: bool = False) -> Outcome:
    return World(plant, is_colocated=is_colocated).run(arrivals)
