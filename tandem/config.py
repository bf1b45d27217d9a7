"""The configuration of a cluster: frozen sections with their bounds. Pure; reading files is `cluster/config_file.py`'s.

`from_mapping` turns a parsed YAML/JSON document into a `ClusterConfig`; every error names field, value and bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin, get_type_hints

from tandem.config_bounds import require as _require
from tandem.config_bounds import require_gpus as _require_gpus
from tandem.config_bounds import require_labels as _require_labels
from tandem.config_bounds import require_ranks as _require_ranks
from tandem.config_bounds import split_labels as split_labels
from tandem.errors import ConfigError
from tandem.kv.layout import Dtype
from tandem.kv.tiering import WritePolicy

TransportName = Literal["ucx", "shm", "collective", "auto"]
DeviceKind = Literal["auto", "cpu", "cuda"]
Precision = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Which model, and in which precision."""

    source: str = "smollm2-135m-instruct"
    """A known model's name, a .gguf file, or a Hugging Face directory with safetensors."""
    served_name: str = ""
    """The name clients use; empty takes the model's own."""
    device: DeviceKind = "auto"
    """What workers compute on: "cpu", "cuda", or "auto": GPUs where there are enough for all workers at the start."""
    dtype: Precision = "auto"
    """Precision of weights, activations and KV; "auto": float32 on CPUs, bfloat16 on GPUs."""
    block_size: int = 16
    """Tokens per KV block."""
    max_context_tokens: int = 0
    """Cap on prompt plus output; 0 takes what the model was trained for."""

    def __post_init__(self) -> None:
        _require(bool(self.source), "model.source", self.source, "a model name or a path")
        _require(self.block_size in (8, 16, 32, 64, 128), "model.block_size", self.block_size, "8, 16, 32, 64 or 128")
        _require(self.max_context_tokens >= 0, "model.max_context_tokens", self.max_context_tokens, "0 or more")

    def kv_dtype(self, *, on_gpu: bool) -> Dtype:
        """The precision meant by `dtype` on a kind of device."""
        if self.dtype == "auto":
            return "bfloat16" if on_gpu else "float32"
        return self.dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillConfig:
    """The prefill pool."""

    num_workers: int = 1
    """Workers to start."""
    num_blocks: int = 1024
    """KV blocks of each worker."""
    tensor_parallel: int = 1
    """Ranks that share each layer of a worker; must divide the model's attention heads, and divide its KV heads or be a
    multiple of them."""
    pipeline_parallel: int = 1
    """Stages of layers of a worker; it has tensor_parallel x pipeline_parallel ranks, all on one node."""
    max_batch_tokens: int = 512
    """Token budget of one iteration: the most prompt tokens computed together."""
    max_iteration_ms: float = 0.0
    """How long an iteration may take: as many tokens are computed together as the measured speed allows, though at
    least a block. 0: only `max_batch_tokens` counts."""
    ageing_tokens_per_s: float = 20.0
    """The prompt with the fewest tokens left is computed first, and each second of waiting counts like so many tokens
    less: a prompt of n tokens is overtaken only by those that come before it has waited n / ageing_tokens_per_s
    seconds. A twentieth of what the worker computes in a second is a good value; much more than that, and length
    hardly counts beside waiting."""
    max_batch_sequences: int = 16
    """Most prompts in one iteration."""
    ticket_lookahead_tokens: int = 1024
    """A prompt's ticket is asked for when fewer prompt tokens than this are to be computed before it for the same
    decode worker."""
    num_threads: int = 0
    """Compute threads of each worker; 0 takes as many as the cores it is pinned to."""
    gpus_per_rank: float = 1.0
    """GPUs that a rank has to itself, where workers compute on GPUs; 0.5 lets two workers of one rank share one."""
    nodes: str = ""
    """Labels of nodes that may take this pool's workers, as in "zone=a,rack=in(r1,r2),gpu=!t4"; empty: all nodes."""

    @property
    def num_ranks(self) -> int:
        """Processes of each worker."""
        return self.tensor_parallel * self.pipeline_parallel

    def __post_init__(self) -> None:
        _require(1 <= self.num_workers <= 1024, "prefill.num_workers", self.num_workers, "1 to 1024")
        _require(self.num_blocks >= 2, "prefill.num_blocks", self.num_blocks, "2 or more")
        _require_ranks("prefill", self.tensor_parallel, self.pipeline_parallel)
        _require(self.max_batch_tokens >= 1, "prefill.max_batch_tokens", self.max_batch_tokens, "1 or more")
        _require(self.max_batch_sequences >= 1, "prefill.max_batch_sequences", self.max_batch_sequences, "1 or more")
        _require(self.max_iteration_ms >= 0, "prefill.max_iteration_ms", self.max_iteration_ms, "0 or more")
        name, rate = "prefill.ageing_tokens_per_s", self.ageing_tokens_per_s
        _require(0 < rate <= 1e9, name, rate, "more than 0 and at most 1e9")
        _require(
            self.ticket_lookahead_tokens >= 1,
            "prefill.ticket_lookahead_tokens",
            self.ticket_lookahead_tokens,
            "1 or more",
        )
        _require(self.num_threads >= 0, "prefill.num_threads", self.num_threads, "0 or more")
        _require_gpus("prefill", self.gpus_per_rank, self.num_ranks)
        _require_labels(self.nodes, "prefill.nodes")


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeConfig:
    """The decode pool."""

    num_workers: int = 1
    """Workers to start."""
    num_blocks: int = 2048
    """KV blocks of each worker."""
    tensor_parallel: int = 1
    """As in the prefill pool; the two pools need not be cut alike."""
    pipeline_parallel: int = 1
    """As in the prefill pool."""
    max_batch_sequences: int = 64
    """Most sequences in one iteration."""
    growth_tokens: int = 256
    """Output tokens for which blocks are reserved at first, and again each time they are used up."""
    swap_blocks: int = 256
    """KV blocks of host memory on each worker, for running requests that make room for one at least a level of priority
    before them; they go on from there later. 0 preempts nobody."""
    num_threads: int = 0
    """Compute threads of each worker; 0 takes as many as the cores it is pinned to."""
    gpus_per_rank: float = 1.0
    """GPUs that a rank has to itself, where workers compute on GPUs; 0.5 lets two workers of one rank share one."""
    nodes: str = ""
    """Labels of nodes that may take this pool's workers, as in "zone=a,rack=in(r1,r2),gpu=!t4"; empty: all nodes."""

    @property
    def num_ranks(self) -> int:
        """Processes of each worker."""
        return self.tensor_parallel * self.pipeline_parallel

    def __post_init__(self) -> None:
        _require(1 <= self.num_workers <= 1024, "decode.num_workers", self.num_workers, "1 to 1024")
        _require(self.num_blocks >= 2, "decode.num_blocks", self.num_blocks, "2 or more")
        _require_ranks("decode", self.tensor_parallel, self.pipeline_parallel)
        _require(self.max_batch_sequences >= 1, "decode.max_batch_sequences", self.max_batch_sequences, "1 or more")
        _require(self.growth_tokens >= 1, "decode.growth_tokens", self.growth_tokens, "1 or more")
        _require(self.swap_blocks >= 0, "decode.swap_blocks", self.swap_blocks, "0 or more")
        _require(self.num_threads >= 0, "decode.num_threads", self.num_threads, "0 or more")
        _require_gpus("decode", self.gpus_per_rank, self.num_ranks)
        _require_labels(self.nodes, "decode.nodes")


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferConfig:
    """How KV moves between the pools."""

    transport: TransportName = "ucx"
    """"ucx" anywhere; "shm" where both workers share a host and a network namespace; "collective" over
    torch.distributed (Gloo, or NCCL between GPUs); "auto" measures those that join two workers and takes the quickest,
    link by link."""
    layers_per_message: int = 0
    """Model layers that travel in one message; 0 takes what the measured speeds of link and compute make best."""
    digest_every: int = 0
    """One in this many messages carries a digest of its bytes; 0: every one from host memory, one in 16 from a GPU."""
    min_gbps: float = 0.0
    """A link measured slower than this many GB/s raises `tandem_kv_link_slow`, between prefix stores
    `tandem_store_slow_links`, and a log line; 0 accepts every link."""
    strict: bool = False
    """Refuse a link slower than min_gbps instead of using it."""
    lease_s: float = 10.0
    """Seconds for which a decode worker holds reserved blocks without a renewal."""
    max_resends: int = 1
    """How often a message that did not arrive whole is sent again before the handoff fails."""

    def __post_init__(self) -> None:
        _require(0.2 <= self.lease_s <= 600, "transfer.lease_s", self.lease_s, "0.2 to 600")
        _require(0 <= self.max_resends <= 10, "transfer.max_resends", self.max_resends, "0 to 10")
        _require(self.layers_per_message >= 0, "transfer.layers_per_message", self.layers_per_message, "0 or more")
        _require(self.digest_every >= 0, "transfer.digest_every", self.digest_every, "0 or more")
        _require(self.min_gbps >= 0, "transfer.min_gbps", self.min_gbps, "0 or more")
        _require(not self.strict or self.min_gbps > 0, "transfer.strict", True, "false without transfer.min_gbps")


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixStoreConfig:
    """Where KV is kept to be found again by its prefix, below the workers' own blocks."""

    enabled: bool = True
    """Keep prompts' and outputs' blocks while nobody needs their room, and let later requests use them."""
    host_bytes: int = 0
    """Bytes of memory on each node for blocks of all its workers; 0 goes without a node's store."""
    host_write: WritePolicy = "through"
    """When a worker's blocks are copied there: "through" as soon as they are computed, "on_eviction" before they go."""
    disk_bytes: int = 0
    """Bytes that each node's store may take below `disk_path`; 0 goes without."""
    disk_path: str = ""
    """Directory on each node, of one store alone, best on a local NVMe drive. Blocks there outlive restarts."""
    disk_write: WritePolicy = "through"
    """When the store's blocks are written to disk."""
    tenant_share: float = 1.0
    """The most of each tier that requests of one cache_salt may hold; those without a salt are not held to it."""

    def __post_init__(self) -> None:
        name = "prefix_store"
        _require(self.host_bytes >= 0, f"{name}.host_bytes", self.host_bytes, "0 or more")
        _require(self.disk_bytes >= 0, f"{name}.disk_bytes", self.disk_bytes, "0 or more")
        _require(0 < self.tenant_share <= 1, f"{name}.tenant_share", self.tenant_share, "more than 0 and at most 1")
        is_off = not self.enabled and self.host_bytes > 0
        _require(not is_off, f"{name}.host_bytes", self.host_bytes, f"0 without {name}.enabled")
        has_host = self.host_bytes > 0 or not self.disk_bytes
        _require(has_host, f"{name}.disk_bytes", self.disk_bytes, f"0 without {name}.host_bytes")
        both = bool(self.disk_bytes) == bool(self.disk_path)
        _require(both, f"{name}.disk_path", self.disk_path, f"given together with {name}.disk_bytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class SecurityConfig:
    """How the cluster's processes know one another."""

    key_file: str = ""
    """File with the cluster's key in hex (`openssl rand -hex 32`), the same on every host; $TANDEM_CLUSTER_KEY wins
    over it. Empty: a cluster of one machine draws a key when it starts, one of several nodes keeps one in
    ~/.config/tandem/CLUSTER.key on the head."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterConfig:
    """The router's endpoints and limits."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all."""
    grpc_port: int = 50051
    """0 takes a free port."""
    http_port: int = 8000
    """0 takes a free port."""
    default_timeout_s: float = 600.0
    """Deadline of requests that set none."""
    max_running_requests: int = 1024
    """More open requests than this are refused as overloaded."""
    max_outputs_at_once: int = 128
    """Outputs of one HTTP request that are under way at once (at least those of one prompt); its other prompts wait for
    them, so that it stands beside other requests and not before them."""
    patience_s: float = 120.0
    """Longest that a request of which nothing was sent yet waits for a worker that is being started, also again, where
    no other can take it; 0 refuses it at once."""
    output_buffer_tokens: int = 4096
    """Tokens kept for a client that reads slowly; past that the request is ended as too slow."""
    health_port: int = 0
    """Port for gRPC health checks alone, without TLS: "" serves while the process lives, "tandem.v1.Inference" while
    requests are served. 0: none."""
    linger_s: float = 0.0
    """Seconds after a signal to stop in which requests are still taken, while clients move to other routers; so none
    is lost. 0 where there is no other router. Only then come `drain_timeout_s`, in which streams end."""
    tls_cert_file: str = ""
    """PEM file with the server's certificate and the chain below its CA; empty serves without TLS."""
    tls_key_file: str = ""
    """PEM file with the certificate's key."""
    tls_client_ca_file: str = ""
    """PEM file of CAs: clients must show a certificate that one of them signed. Empty asks for none."""
    api_keys_file: str = ""
    """File with one API key a line: requests must carry one as "authorization: Bearer KEY". Empty asks for none."""
    cors_origins: str = ""
    """Web pages' origins that may call the HTTP API, with commas between them; * for all. Empty: none."""

    def __post_init__(self) -> None:
        self._check_ports()
        self._check_tls()
        _require(self.default_timeout_s > 0, "router.default_timeout_s", self.default_timeout_s, "more than 0")
        _require(self.patience_s >= 0, "router.patience_s", self.patience_s, "0 or more")
        _require(self.max_running_requests >= 1, "router.max_running_requests", self.max_running_requests, "1 or more")
        _require(self.max_outputs_at_once >= 1, "router.max_outputs_at_once", self.max_outputs_at_once, "1 or more")
        _require(self.output_buffer_tokens >= 1, "router.output_buffer_tokens", self.output_buffer_tokens, "1 or more")

        _require(0 <= self.linger_s <= 600, "router.linger_s", self.linger_s, "0 to 600")

    def _check_ports(self) -> None:
        taken: dict[int, str] = {}
        for name in ("grpc_port", "http_port", "health_port"):
            port = getattr(self, name)
            _require(0 <= port <= 65535, f"router.{name}", port, "0 to 65535")
            _require(port == 0 or port not in taken, f"router.{name}", port, f"another port than {taken.get(port)}")
            taken[port] = f"router.{name}"

    def _check_tls(self) -> None:
        both = bool(self.tls_cert_file) == bool(self.tls_key_file)
        _require(both, "router.tls_key_file", self.tls_key_file, "given together with router.tls_cert_file")
        name, value = "router.tls_client_ca_file", self.tls_client_ca_file
        _require(not value or bool(self.tls_cert_file), name, value, "given with router.tls_cert_file, or be empty")


@dataclass(frozen=True, kw_only=True, slots=True)
class RegistryConfig:
    """Where workers register."""

    redis_url: str = ""
    """redis://host:port/db of an external server; empty starts an embedded one."""
    heartbeat_s: float = 1.0
    """How often a worker renews its registration."""
    ttl_s: float = 5.0
    """How long a registration lives without renewal."""

    def __post_init__(self) -> None:
        _require(self.heartbeat_s > 0, "registry.heartbeat_s", self.heartbeat_s, "more than 0")
        _require(
            self.ttl_s >= 2 * self.heartbeat_s, "registry.ttl_s", self.ttl_s, "at least twice registry.heartbeat_s"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterConfig:
    """Everything that `tandem up` needs."""

    cluster: str = "tandem"
    """Name of the cluster: prefix of its keys in Redis."""
    model: ModelConfig = field(default_factory=ModelConfig)
    prefill: PrefillConfig = field(default_factory=PrefillConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    registry: RegistryConfig = field(default_factory=RegistryConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    prefix_store: PrefixStoreConfig = field(default_factory=PrefixStoreConfig)
    drain_timeout_s: float = 30.0
    """Longest that a shutdown waits for running requests."""
    replacement_timeout_s: float = 30.0
    """Longest that a node which leaves waits, beyond `drain_timeout_s`, until its workers are replaced elsewhere: as
    long as a worker takes to load its model. What has no successor then is cut off."""
    pin_cores: bool = True
    """Pin each worker to cores of its own when there are enough."""
    controller_metrics_port: int = 0
    """Where the controller serves /metrics; 0 takes a free port."""

    def __post_init__(self) -> None:
        for name in ("drain_timeout_s", "replacement_timeout_s"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        for name, num_blocks in (("prefill", self.prefill.num_blocks), ("decode", self.decode.num_blocks)):
            needed = -(-self.model.max_context_tokens // self.model.block_size)
            bound = f"{needed} or more, to hold model.max_context_tokens"
            _require(num_blocks >= needed, f"{name}.num_blocks", num_blocks, bound)
        _require(bool(self.cluster), "cluster", self.cluster, "a name")
        port = self.controller_metrics_port
        _require(0 <= port <= 65535, "controller_metrics_port", port, "0 to 65535")


_KINDS = {int: "an int", float: "a number", str: "a string", bool: "true or false"}


def _unknown(path: str, key: object, *, known: list[str]) -> str:
    close = get_close_matches(str(key), known, n=1)
    hint = f"did you mean {path}{close[0]}?" if close else f"known here are {', '.join(known)}"
    return f"{path}{key} is an unknown field; {hint}"


def _check_scalar(name: str, hint: Any, value: Any) -> Any:
    if get_origin(hint) is Literal:
        _require(value in get_args(hint), name, value, "one of " + ", ".join(map(str, get_args(hint))))
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    is_mistaken_bool = isinstance(value, bool) and hint is not bool
    _require(isinstance(value, hint) and not is_mistaken_bool, name, value, _KINDS.get(hint, hint.__name__))
    return value


def _build(cls: Any, values: Mapping[str, Any], path: str) -> Any:
    _require(isinstance(values, Mapping), path.rstrip(".") or "the configuration", values, "a mapping")
    known = {f.name: f for f in fields(cls)}
    for key in values:
        if key not in known:
            raise ConfigError(_unknown(path, key, known=list(known)), param=f"{path}{key}")
    hints = get_type_hints(cls)
    built = {}
    for key, value in values.items():
        hint: Any = hints[key]
        is_section = is_dataclass(hint)
        built[key] = _build(hint, value, f"{path}{key}.") if is_section else _check_scalar(path + key, hint, value)
    return cls(**built)


def from_mapping(values: Mapping[str, Any]) -> ClusterConfig:
    """Builds the configuration from a parsed document. Raises ConfigError; unknown keys are errors."""
    config: ClusterConfig = _build(ClusterConfig, values, "")
    return config


def to_mapping(config: ClusterConfig) -> dict[str, Any]:
    """Inverse of `from_mapping`: plain data, for passing a configuration to another process."""
    return asdict(config)
