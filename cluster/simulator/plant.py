"""What is simulated: the cluster's own configuration, and what its devices and links can do. Pure."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from cluster.simulator.cost_model import DeviceSpec, ModelCost, Work, WorkerCost
from kv_transfer.sizing import LinkSpeed
from prefill_pool.shipping import KvShare
from tandem.config import ClusterConfig
from tandem.errors import ConfigError

_BATCH_TOKENS = 2048
_BATCH_SEQUENCES = 256
_SUITED = (
    "prefill.num_blocks",
    "prefill.max_batch_tokens",
    "prefill.ticket_lookahead_tokens",
    "prefill.ageing_tokens_per_s",
    "decode.num_blocks",
    "decode.max_batch_sequences",
    "router.max_running_requests",
)
"""What `config_for` sets."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plant:
    """`config` means here what it means to a live cluster; its number of blocks too."""

    model: ModelCost
    device: DeviceSpec
    link: LinkSpeed
    """Of the KV between two workers."""
    config: ClusterConfig = field(default_factory=ClusterConfig)
    control_s: float = 0.001
    """One way of a control message: a leg's request, an offer, a ticket, a token to the client."""

    def __post_init__(self) -> None:
        for pool in ("prefill", "decode"):
            stages = getattr(self.config, pool).pipeline_parallel
            if stages > 1:
                raise ConfigError(
                    f"{pool}.pipeline_parallel must be 1 to be simulated, got {stages}", param="pipeline_parallel"
                )

    @property
    def block_size(self) -> int:
        """Tokens."""
        return self.config.model.block_size

    @property
    def kv_share(self) -> KvShare:
        """All of a block: the ranks of a worker have one port together."""
        num_layers = self.model.num_layers
        return KvShare(
            num_layers=num_layers,
            block_size=self.block_size,
            block_layer_bytes=self.model.token_bytes * self.block_size / num_layers,
        )

    def shortfalls(self) -> tuple[str, ...]:
        """Pools whose weights and blocks the devices' memory would not hold, for people; simulated all the same."""
        return tuple(
            f"a {pool} worker holds {need / 1e9:.0f} GB of weights and KV, its devices have {room / 1e9:.0f} GB"
            for pool, cost, num_blocks in (
                ("prefill", self.prefill_cost, self.config.prefill.num_blocks),
                ("decode", self.decode_cost, self.config.decode.num_blocks),
            )
            if (need := self.model.weight_bytes + num_blocks * self.block_size * self.model.token_bytes)
            > (room := cost.num_devices * self.device.memory_bytes)
        )

    @property
    def prefill_cost(self) -> WorkerCost:
        """Of one prefill worker."""
        return WorkerCost(model=self.model, device=self.device, num_devices=self.config.prefill.tensor_parallel)

    @property
    def decode_cost(self) -> WorkerCost:
        """Of one decode worker."""
        return WorkerCost(model=self.model, device=self.device, num_devices=self.config.decode.tensor_parallel)


def config_for(model: ModelCost, device: DeviceSpec, base: ClusterConfig) -> ClusterConfig:
    """Settings that suit a device, where a cluster has no configuration of its own yet but for `base`'s sizes.

    Blocks are what fits beside the weights; the router takes twice the sequences of as many batches as there are
    workers, or what it takes by itself. Raises ConfigError when there is no room for any.
    """
    cost = WorkerCost(model=model, device=device, num_devices=base.prefill.tensor_parallel)
    num_blocks = cost.num_blocks(base.model.block_size)
    tokens_per_s = _BATCH_TOKENS / cost.iteration_s([Work(num_before=0, num_tokens=_BATCH_TOKENS)])
    prefill = replace(
        base.prefill,
        num_blocks=num_blocks,
        max_batch_tokens=_BATCH_TOKENS,
        ticket_lookahead_tokens=2 * _BATCH_TOKENS,
        ageing_tokens_per_s=tokens_per_s / 20,
    )
    decode = replace(base.decode, num_blocks=num_blocks, max_batch_sequences=_BATCH_SEQUENCES)
    num_workers = prefill.num_workers + decode.num_workers
    most = max(base.router.max_running_requests, 2 * _BATCH_SEQUENCES * num_workers)
    return replace(base, prefill=prefill, decode=decode, router=replace(base.router, max_running_requests=most))


def left_out(config: ClusterConfig, said: AbstractSet[str], *, suited: ClusterConfig) -> tuple[str, ...]:
    """Fields that a configuration does not set (`said` are those that it does) and that another one, which suits the
    device, has otherwise: each with the default that a live cluster takes, too, and what would suit.
    """
    return tuple(
        f"{name} {taken:,g} ({better:,g})"
        for name in _SUITED
        if name not in said and (taken := _value(config, name)) != (better := _value(suited, name))
    )


def _value(config: ClusterConfig, name: str) -> float:
    section, _, key = name.partition(".")
    return float(getattr(getattr(config, section), key))
