"""What a Ray node is told and what it says of itself. Pure; shared by `ray_node.py` and the process it starts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from urllib.parse import unquote, urlsplit

from tandem.errors import ConfigError

OBJECT_STORE_BYTES = 80 * 2**20
"""Ray carries control calls only: neither tokens nor KV go through its object store."""
MARK = "TANDEM_RAY_NODE"
"""In the environment of every process of a node: the node's temporary directory."""
LOOPBACK_IP = "127.0.0.2"
"""Where a node of one machine listens: Ray turns 127.0.0.1 into the machine's outer address, this one it leaves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeOffer:
    """What a node brings: its address, resources (slots of the pools) and labels (topology: zone, rack, domain).

    `num_gpus`: None lets Ray look for them, among those that CUDA_VISIBLE_DEVICES shows.
    """

    node_ip: str = LOOPBACK_IP
    resources: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)
    num_cpus: int = 1
    num_gpus: int | None = None

    def __post_init__(self) -> None:
        if self.node_ip in ("127.0.0.1", "::1", "localhost"):
            raise ConfigError(
                f"the node's address must be another than {self.node_ip}, which Ray takes for the machine's outer "
                f"address; {LOOPBACK_IP} stays inside as well",
                param="node_ip",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class RayStorage:
    """An external Redis in which a head keeps its state, so that a successor takes over nodes and actors.

    `namespace` (of the cluster) goes into the environment: see `ray_environment.py`.
    """

    host: str
    port: int
    username: str = ""
    password: str = ""
    tls: bool = False

    @classmethod
    def from_url(cls, url: str, *, password: str = "") -> RayStorage:
        """From redis://[user[:password]@]host:port or rediss://...; Ray always takes database 0. Raises ConfigError."""
        parts = urlsplit(url)
        if parts.scheme not in ("redis", "rediss") or not parts.hostname:
            raise ConfigError(f"registry.redis_url must be redis://HOST:PORT or rediss://HOST:PORT, got {url!r}")
        return cls(
            host=parts.hostname,
            port=parts.port or 6379,
            username=unquote(parts.username or ""),
            password=unquote(parts.password or "") or password,
            tls=parts.scheme == "rediss",
        )

    @property
    def address(self) -> str:
        """As Ray wants it."""
        return f"{'rediss' if self.tls else 'redis'}://{self.host}:{self.port}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RayAddress:
    """A node that is up. `head` ("host:port") is where drivers connect and other nodes join."""

    head: str
    node_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RayNodeSettings:
    """One node, as its process is told. Without `head_address` it is a head; `storage` is `RayStorage.address`."""

    temp_dir: str
    node_ip: str
    head_address: str = ""
    port: int = 0
    num_cpus: int = 0
    num_gpus: int | None = None
    resources: dict[str, float]
    labels: dict[str, str]
    storage: str = ""
    storage_user: str = ""
    """Its password is in the environment: this goes over the command line."""

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RayNodeSettings:
        """Inverse of `to_json`."""
        return cls(**json.loads(text))
