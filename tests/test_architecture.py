"""Import directions, purity, module docstrings and file sizes, from one table; and that the checks can fail."""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("tandem", "kv_transfer", "prefill_pool", "decode_pool", "router", "cluster", "benchmarks", "tools")
MAX_LINES = 400

MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "tandem": (),
    "kv_transfer": ("tandem",),
    "prefill_pool": ("kv_transfer", "tandem"),
    "decode_pool": ("kv_transfer", "tandem"),
    "router": ("kv_transfer", "tandem"),
    "cluster": ("router", "prefill_pool", "decode_pool", "kv_transfer", "tandem"),
    "benchmarks": ("cluster", "router", "prefill_pool", "decode_pool", "kv_transfer", "tandem"),
    "tools": ("tandem",),
}
"""Which of our top-level packages each may import, besides itself."""

BELOW_IN_TANDEM: dict[str, tuple[str, ...]] = {
    "types": (),
    "errors": (),
    "kv": ("types", "errors"),
    "config_bounds": ("errors",),
    "config": ("config_bounds", "kv", "types", "errors"),
    "model": ("kv", "config", "types", "errors"),
    "prefix_store": (
        *("tasks", "redis_access", "observability", "rpc", "secret"),
        *("kv", "config", "types", "errors"),
    ),
    "secret": ("errors",),
    "key_source": ("secret", "config", "errors"),
    "ranks": ("secret", "model", "kv", "config", "types", "errors"),
    "rpc": ("file_stamp", "secret", "kv", "config", "types", "errors"),
    "redis_access": ("errors",),
    "file_stamp": (),
    "registry": ("redis_access", "config", "types", "errors"),
    "pool_state": ("redis_access", "config", "types", "errors"),
    "observability": ("rpc", "config", "types", "errors"),
    "tasks": (),
    "worker": (
        *("tasks", "registry", "ranks", "observability", "rpc", "key_source", "secret", "model", "prefix_store"),
        *("kv", "config", "types", "errors"),
    ),
}
"""Which parts of `tandem` each part may import, besides itself."""

PURE = (
    "tandem/types.py",
    "tandem/config.py",
    "tandem/config_bounds.py",
    "tandem/errors.py",
    "tandem/kv/layout.py",
    "tandem/kv/sharding.py",
    "tandem/kv/hashing.py",
    "tandem/kv/block_pool.py",
    "tandem/kv/eviction.py",
    "tandem/kv/prefix_directory.py",
    "tandem/kv/prefix_pool.py",
    "tandem/kv/prefix_index.py",
    "tandem/kv/segment_log.py",
    "tandem/kv/tiering.py",
    "tandem/model/spec.py",
    "tandem/model/parallel.py",
    "tandem/model/attention/page_table.py",
    "tandem/model/decode_inputs.py",
    "tandem/model/tensor_names.py",
    "tandem/model/config_fields.py",
    "tandem/model/families/family.py",
    "tandem/model/families/llama.py",
    "tandem/model/families/qwen.py",
    "tandem/model/families/gemma.py",
    "tandem/model/families/experts.py",
    "tandem/model/families/registry.py",
    "tandem/secret.py",
    "kv_transfer/plan.py",
    "kv_transfer/sizing.py",
    "kv_transfer/ticket.py",
    "kv_transfer/block_claims.py",
    "kv_transfer/handoff.py",
    "kv_transfer/source.py",
    "kv_transfer/destination.py",
    "prefill_pool/order.py",
    "prefill_pool/pace.py",
    "prefill_pool/scheduler.py",
    "prefill_pool/sequence.py",
    "prefill_pool/shipping.py",
    "decode_pool/scheduler.py",
    "decode_pool/plan.py",
    "decode_pool/preemption.py",
    "decode_pool/swap_space.py",
    "decode_pool/safety.py",
    "decode_pool/group.py",
    "router/openai_messages.py",
    "router/grammars.py",
    "router/json_schema.py",
    "router/template_use.py",
    "router/tools.py",
    "router/tool_parser.py",
    "router/naming.py",
    "router/view.py",
    "router/policy.py",
    "router/charges.py",
    "router/lifecycle.py",
    "router/retry.py",
    "router/admission.py",
    "router/stop_strings.py",
    "cluster/placement.py",
    "cluster/room.py",
    "cluster/scaling.py",
    "cluster/store_plan.py",
    "cluster/pool_memory.py",
    "cluster/events.py",
    "cluster/fabric.py",
    "cluster/short_ids.py",
    "cluster/ray_node_settings.py",
    "cluster/simulator/events.py",
    "cluster/simulator/cost_model.py",
    "cluster/simulator/models.py",
    "cluster/simulator/workload.py",
    "cluster/simulator/network.py",
    "cluster/simulator/life.py",
    "cluster/simulator/plant.py",
    "cluster/simulator/handoff.py",
    "cluster/simulator/prefill.py",
    "cluster/simulator/decode.py",
    "cluster/simulator/router.py",
    "cluster/simulator/usage.py",
    "cluster/simulator/disaggregated.py",
    "cluster/simulator/colocated.py",
    "cluster/simulator/world.py",
    "cluster/simulator/summary.py",
    "cluster/simulator/splits.py",
)
"""Modules that decide: standard library only, without clock, threads, environment or global randomness.

Some are still to come; each is checked from the day it is there.
"""

IMPURE_STDLIB = {"asyncio", "threading", "multiprocessing", "subprocess", "socket", "logging", "time", "datetime", "io"}
IMPURE_ATTRIBUTES = {"os.environ", "os.getenv", "os.urandom", "secrets", "uuid.uuid4"}


PICKLING = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "multiprocessing"}
"""What runs code that it reads; multiprocessing pickles what goes through its pipes and queues."""
SERVING = [package for package in PACKAGES if package != "benchmarks"]
PICKLING_CALLS = {
    *("torch.load", "torch.save", "np.load", "np.save", "numpy.load", "numpy.save"),
    *("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"),
    *("send_object_list", "recv_object_list", "unsafe_load", "full_load"),
}


def modules(packages: Sequence[str] = PACKAGES) -> list[Path]:
    """All hand-written modules."""
    found = (path for package in packages for path in (ROOT / package).rglob("*.py"))
    return sorted(path for path in found if "_pb2" not in path.name)


def imported(tree: ast.AST) -> list[str]:
    """Dotted names of everything imported, wherever in the file."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append("." * node.level)
    return names


def direction_problems(path: str, source: str) -> list[str]:
    """Imports that go up or sideways. `path` is relative to the repository."""
    package = path.split("/", 1)[0]
    problems = []
    for name in imported(ast.parse(source)):
        target = name.split(".")[0]
        if name.startswith("."):
            problems.append("imports relatively")
        elif target in MAY_IMPORT and target != package and target not in MAY_IMPORT[package]:
            problems.append(f"imports {name}")
        elif target == package == "tandem":
            problems += tandem_problems(path, name)
    return problems


def tandem_problems(path: str, name: str) -> list[str]:
    """The same inside `tandem`."""
    part = Path(path.split("/")[1]).stem
    target = name.split(".")[1]
    if part not in BELOW_IN_TANDEM:
        return [] if part == "__init__" else [f"tandem/{part} is not in the table"]
    return [] if target in (part, *BELOW_IN_TANDEM[part]) else [f"imports {name}"]


def purity_problems(path: str, source: str) -> list[str]:
    """What a pure module must not touch."""
    tree = ast.parse(source)
    problems = []
    for name in imported(tree):
        top = name.split(".")[0]
        if top in MAY_IMPORT:
            module = "/".join(name.split(".")[:-1])
            if f"{module}.py" not in PURE and f"{name.replace('.', '/')}.py" not in PURE:
                problems.append(f"imports the impure {name}")
        elif top not in sys.stdlib_module_names or top in IMPURE_STDLIB or name in IMPURE_ATTRIBUTES:
            problems.append(f"imports {name}")
    return problems + attribute_problems(tree)


def attribute_problems(tree: ast.AST) -> list[str]:
    """Uses of the environment, of files and of the global random generator."""
    problems = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = f"{node.value.id}.{node.attr}"
            global_random = node.value.id == "random" and node.attr != "Random"
            if name in IMPURE_ATTRIBUTES or global_random:
                problems.append(f"uses {name}")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("open", "print"):
            problems.append(f"calls {node.func.id}")
    return problems


def pickling_problems(source: str) -> list[str]:
    """Ways to write or read what only pickle, or its kin, can."""
    tree = ast.parse(source)
    names = [name for name in imported(tree) if name.split(".")[0] in PICKLING]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            whole = f"{node.value.id}.{node.attr}" if isinstance(node.value, ast.Name) else node.attr
            names += [name for name in dict.fromkeys((whole, node.attr)) if name in PICKLING_CALLS]
    return [f"uses {name}" for name in names]


@pytest.mark.parametrize("path", modules(SERVING), ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_pickled(path: Path) -> None:
    assert pickling_problems(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "from multiprocessing.connection import Client",
        "import torch\nx = torch.load('f')",
        "from torch import distributed as dist\ndist.broadcast_object_list([1])",
        "import yaml\nyaml.unsafe_load('x')",
    ],
)
def test_what_pickles_is_found(source: str) -> None:
    assert len(pickling_problems(source)) == 1


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_what_lies_below_it(path: Path) -> None:
    assert direction_problems(str(path.relative_to(ROOT)), path.read_text()) == []


@pytest.mark.parametrize("name", [name for name in PURE if (ROOT / name).exists()])
def test_a_module_that_decides_is_pure(name: str) -> None:
    assert purity_problems(name, (ROOT / name).read_text()) == []


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_says_what_it_is_and_stays_short(path: Path) -> None:
    source = path.read_text()
    assert not source.strip() or ast.get_docstring(ast.parse(source))
    assert len(source.splitlines()) <= MAX_LINES


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("tandem/types.py", "from router.policy import route"),
        ("router/view.py", "import prefill_pool.worker"),
        ("prefill_pool/worker.py", "def f():\n    from decode_pool import worker"),
        ("kv_transfer/sender.py", "import cluster"),
        ("tandem/kv/layout.py", "from tandem.model import spec"),
        ("router/view.py", "from . import policy"),
        ("tandem/new.py", "from tandem import types"),
    ],
)
def test_a_wrong_direction_is_found(path: str, source: str) -> None:
    assert len(direction_problems(path, source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import torch",
        "from time import monotonic",
        "import asyncio",
        "from os import environ",
        "import os\nhome = os.environ['HOME']",
        "import random\nx = random.random()",
        "from tandem.kv.cache import KvCache",
        "print('x')",
    ],
)
def test_an_impurity_is_found(source: str) -> None:
    assert purity_problems("router/policy.py", source)


def test_a_seeded_generator_is_pure() -> None:
    assert purity_problems("router/policy.py", "import random\nrng = random.Random(1)\nx = rng.random()") == []
