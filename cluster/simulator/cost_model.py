"""What an iteration and a transfer cost, from the numbers of a model and of a device: FLOPs, bytes, seconds. Pure.

The first model of its kind: an iteration takes the longer of its arithmetic and its reading from memory, and what of
the shorter one a device cannot do beside it. Weights are read once an iteration, a sequence's KV once; every token is
multiplied with every weight (2 FLOPs each); every pair of a query and a key that it sees takes 4 * head_dim FLOPs in
each head and layer. Units: tokens, bytes, FLOPs, seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tandem.errors import ConfigError
from tandem.model.spec import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSpec:
    """What one device sustains, not what its data sheet promises."""

    name: str
    flops_per_s: float
    bytes_per_s: float
    """Of its own memory."""
    memory_bytes: float
    host_bytes_per_s: float
    """Between it and its host's memory."""
    peer_bytes_per_s: float
    """Between it and others of the same worker."""
    iteration_s: float = 0.0
    """What an iteration costs beside arithmetic and memory: scheduling, launches, sampling."""
    overlap: float = 1.0
    """Of the shorter one of arithmetic and reading, how much goes on beside the longer: all where there are many cores
    for each, nothing where one core does them by turns."""

    def __post_init__(self) -> None:
        if not 0 <= self.overlap <= 1:
            raise ConfigError(f"overlap of a device must be 0 to 1, got {self.overlap}")
        for name in ("flops_per_s", "bytes_per_s", "memory_bytes", "host_bytes_per_s", "peer_bytes_per_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} of a device must be more than 0, got {getattr(self, name)}")

    @property
    def ridge(self) -> float:
        """FLOPs per byte from which on arithmetic takes longer than memory."""
        return self.flops_per_s / self.bytes_per_s


H100 = DeviceSpec(
    name="h100",
    flops_per_s=500e12,
    bytes_per_s=3.35e12,
    memory_bytes=80e9,
    host_bytes_per_s=64e9,
    peer_bytes_per_s=900e9,
)
"""SXM5: half of the data sheet's dense fp16 rate is what large products reach."""
H200 = DeviceSpec(
    name="h200",
    flops_per_s=500e12,
    bytes_per_s=4.8e12,
    memory_bytes=141e9,
    host_bytes_per_s=64e9,
    peer_bytes_per_s=900e9,
)
DEVICES = {device.name: device for device in (H100, H200)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """Weights that only some tokens meet."""

    num_experts: int
    num_chosen: int
    parameters_each: float
    """Of one expert, over all layers that have some."""

    def met_by(self, num_tokens: int) -> float:
        """Expected number of experts that a batch reads, when every token chooses at random."""
        missed = (1 - self.num_chosen / self.num_experts) ** num_tokens
        return self.num_experts * (1 - missed)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCost:
    """A decoder, as far as it matters for time and room."""

    name: str
    num_parameters: float
    """All of them."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    value_bytes: int = 2
    """Of a weight, and of a number in the KV."""
    windows: tuple[int | None, ...] = ()
    """Newest tokens that each layer attends to, None for all; empty: all layers attend to all."""
    experts: Experts | None = None

    @property
    def token_bytes(self) -> int:
        """KV of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.value_bytes

    @property
    def weight_bytes(self) -> float:
        """What a worker must hold."""
        return self.num_parameters * self.value_bytes

    @property
    def active_parameters(self) -> float:
        """Weights that one token is multiplied with."""
        if self.experts is None:
            return self.num_parameters
        idle = self.experts.num_experts - self.experts.num_chosen
        return self.num_parameters - idle * self.experts.parameters_each

    @property
    def num_all_reduces(self) -> int:
        """Of one iteration on several tensor ranks: two a layer, whatever is in the batch."""
        return 2 * self.num_layers

    def read_weight_bytes(self, num_tokens: int) -> float:
        """Weights that an iteration of so many tokens reads."""
        if self.experts is None:
            return self.weight_bytes
        missed = self.experts.num_experts - self.experts.met_by(num_tokens)
        return self.weight_bytes - missed * self.experts.parameters_each * self.value_bytes

    def window_counts(self) -> dict[int | None, int]:
        """How many layers there are of each window."""
        windows = self.windows or (None,) * self.num_layers
        return {window: windows.count(window) for window in dict.fromkeys(windows)}


def cost_of(spec: ModelSpec, *, value_bytes: int) -> ModelCost:
    """The same of a model as its own configuration describes it; norms and biases are too small to count."""
    hidden = spec.hidden_size
    attention = 2 * hidden * spec.head_dim * (spec.num_heads + spec.num_kv_heads)
    num_sparse = sum(layer.has_experts for layer in spec.layers)
    dense = (spec.num_layers - num_sparse) * 3 * hidden * spec.intermediate_size
    embeddings = spec.vocab_size * hidden * (1 if spec.tie_word_embeddings else 2)
    experts = None
    if spec.experts is not None and num_sparse:
        experts = Experts(
            num_experts=spec.experts.num_experts,
            num_chosen=spec.experts.num_chosen,
            parameters_each=num_sparse * 3 * hidden * spec.experts.intermediate_size,
        )
    sparse = 0.0 if experts is None else experts.num_experts * (experts.parameters_each + num_sparse * hidden)
    return ModelCost(
        name=spec.name,
        num_parameters=spec.num_layers * attention + dense + sparse + embeddings,
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        hidden_size=hidden,
        value_bytes=value_bytes,
        windows=tuple(layer.window for layer in spec.layers),
        experts=experts,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What an iteration does for one sequence: `num_tokens` new tokens behind `num_before` whose KV is there."""

    num_before: int
    num_tokens: int = 1


def num_pairs(work: Work, window: int | None = None) -> float:
    """(query, key) pairs of causal attention; a query also sees itself."""
    first, last = work.num_before + 1, work.num_before + work.num_tokens
    if window is None or last <= window:
        return work.num_tokens * (first + last) / 2
    if first >= window:
        return float(work.num_tokens * window)
    num_growing = window - first
    return num_growing * (first + window - 1) / 2 + (work.num_tokens - num_growing) * window


@dataclass(frozen=True, kw_only=True, slots=True)
class IterationCost:
    """Of one iteration."""

    linear_flops: float
    attention_flops: float
    weight_bytes: float
    kv_bytes: float

    @property
    def flops(self) -> float:
        """All arithmetic."""
        return self.linear_flops + self.attention_flops

    @property
    def num_bytes(self) -> float:
        """All reading from memory."""
        return self.weight_bytes + self.kv_bytes

    @property
    def intensity(self) -> float:
        """FLOPs of the matrix products per byte; bound by memory below the device's ridge."""
        return self.linear_flops / self.num_bytes


def iteration_cost(model: ModelCost, batch: Iterable[Work]) -> IterationCost:
    """Of all sequences of a batch together; KV is read once for each sequence, its new tokens' own is not counted."""
    num_tokens = 0
    pairs = rows = 0.0
    windows = model.window_counts()
    for work in batch:
        num_tokens += work.num_tokens
        for window, num_layers in windows.items():
            pairs += num_layers * num_pairs(work, window)
            rows += num_layers * (work.num_before if window is None else min(work.num_before, window))
    return IterationCost(
        linear_flops=2.0 * model.active_parameters * num_tokens,
        attention_flops=4.0 * model.head_dim * model.num_heads * pairs,
        weight_bytes=model.read_weight_bytes(num_tokens),
        kv_bytes=rows / model.num_layers * model.token_bytes,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerCost:
    """A model on `num_devices` devices that share every layer (tensor parallelism)."""

    model: ModelCost
    device: DeviceSpec
    num_devices: int = 1

    def iteration_s(self, batch: Sequence[Work]) -> float:
        """Seconds of one iteration."""
        cost = iteration_cost(self.model, batch)
        flops_per_s, bytes_per_s = (
            self.num_devices * rate for rate in (self.device.flops_per_s, self.device.bytes_per_s)
        )
        num_tokens = sum(work.num_tokens for work in batch)
        shorter_s, longer_s = sorted((cost.flops / flops_per_s, cost.num_bytes / bytes_per_s))
        compute_s = longer_s + (1.0 - self.device.overlap) * shorter_s
        return compute_s + self.reduce_s(num_tokens) + self.device.iteration_s

    def reduce_s(self, num_tokens: int) -> float:
        """Seconds in which the devices sum their parts: a ring moves each value 2 (n - 1) / n times."""
        if self.num_devices == 1:
            return 0.0
        num_bytes = num_tokens * self.model.hidden_size * self.model.value_bytes
        share = 2 * (self.num_devices - 1) / self.num_devices
        return self.model.num_all_reduces * share * num_bytes / self.device.peer_bytes_per_s

    @property
    def kv_room_bytes(self) -> float:
        """Memory beside the weights; not more than 0 when they do not fit."""
        return self.num_devices * self.device.memory_bytes - self.model.weight_bytes

    def num_blocks(self, block_size: int, *, usable: float = 0.9) -> int:
        """Blocks that fit beside the weights into `usable` of the devices' memory.

        Raises ConfigError when there is no room for any.
        """
        room = usable * self.num_devices * self.device.memory_bytes - self.model.weight_bytes
        count = int(room // (block_size * self.model.token_bytes))
        if count < 2:
            raise ConfigError(
                f"{self.model.name} takes {self.model.weight_bytes / 1e9:.0f} GB, which leaves no room for KV on "
                f"{self.num_devices} x {self.device.name} of {self.device.memory_bytes / 1e9:.0f} GB: "
                "give a worker more devices (tensor_parallel)"
            )
        return count


def transfer_s(num_bytes: float, *, bytes_per_s: float, latency_s: float = 0.0) -> float:
    """Seconds of one message."""
    return latency_s + num_bytes / bytes_per_s


def num_iterations(num_tokens: int, *, chunk_tokens: int) -> int:
    """Of a prompt that is computed in chunks."""
    return -(-num_tokens // chunk_tokens)


def chunks_of(num_tokens: int, *, chunk_tokens: int) -> list[Work]:
    """A prompt cut into chunks, in order."""
    return [
        Work(num_before=start, num_tokens=min(chunk_tokens, num_tokens - start))
        for start in range(0, num_tokens, chunk_tokens)
    ]
