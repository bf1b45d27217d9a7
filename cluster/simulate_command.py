"""`tandem simulate`: what a cluster would do under a load, and how many workers of each pool serve it best."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.config_file import fields_in, load_config
from cluster.console import make_console
from cluster.options import ConfigOption, JsonOption
from cluster.simulator.cost_model import DEVICES, DeviceSpec
from cluster.simulator.plant import Plant, config_for, left_out
from cluster.simulator.report import print_figures, print_plant, print_splits
from cluster.simulator.sources import describe_model, read_rows
from cluster.simulator.splits import best_of, try_splits
from cluster.simulator.summary import Slo, figures_of
from cluster.simulator.workload import Arrival, Lengths, from_trace, poisson
from cluster.simulator.world import World
from kv_transfer.sizing import LinkSpeed
from tandem.errors import ConfigError
from tandem.kv.layout import DTYPE_BYTES

_GIGA = 1e9
_DEFAULT_MODEL = "llama-3.1-8b"


_NEEDS = {"speed": "trace", "quantum": "trace"}
_EXCLUDED_BY = {
    **dict.fromkeys(("rate", "prompt_tokens", "output_tokens", "spread"), "trace"),
    **dict.fromkeys(("prefill", "decode"), "workers"),
}
"""Options that would say nothing beside another one."""


def _positive(text: str, help_text: str, *, most: float = 1e6) -> Any:
    return typer.Option(text, min=1e-6, max=most, help=help_text)


def simulate(
    context: typer.Context,
    config: ConfigOption = None,
    model: Annotated[
        str | None, typer.Option("--model", help="llama-2-7b, llama-3.1-8b, ..., a config.json or a .gguf file.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help=f"What workers run on: {', '.join(DEVICES)}.")] = "h100",
    tflops: Annotated[float | None, _positive("--tflops", "Sustained TFLOP/s of a device, instead of its own.")] = None,
    memory_gbps: Annotated[float | None, _positive("--memory-gbps", "GB/s of its memory, instead of its own.")] = None,
    memory_gb: Annotated[float | None, _positive("--memory-gb", "GB of it, instead of its own.", most=1000)] = None,
    overhead_ms: Annotated[float, typer.Option(min=0, max=1e6, help="What an iteration costs beside the model.")] = 0.0,
    overlap: Annotated[
        float, typer.Option(min=0, max=1, help="How much of arithmetic and reading goes on side by side.")
    ] = 1.0,
    link_gbps: Annotated[float, _positive("--link-gbps", "GB/s between a prefill and a decode worker.")] = 50.0,
    link_us: Annotated[float, typer.Option(min=0, max=1e9, help="Microseconds of a small message.")] = 5.0,
    prefill: Annotated[int | None, typer.Option(min=1, max=1024, help="Prefill workers.")] = None,
    decode: Annotated[int | None, typer.Option(min=1, max=1024, help="Decode workers.")] = None,
    workers: Annotated[int | None, typer.Option(min=2, max=1024, help="Try every cut of so many, and none.")] = None,
    tensor_parallel: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Devices of each worker, which share every layer.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="JSON lines: timestamp (ms), input_length, output_length.")] = None,
    speed: Annotated[float, _positive("--speed", "How much faster the trace is replayed.")] = 1.0,
    quantum: Annotated[
        float, typer.Option(min=0, max=1e6, help="Seconds to which the trace's times are rounded, to spread them over.")
    ] = 0.0,
    rate: Annotated[float, _positive("--rate", "Requests a second, when there is no trace.")] = 4.0,
    prompt_tokens: Annotated[float, typer.Option(min=1, max=1e9, help="Mean of their prompts.")] = 2000.0,
    output_tokens: Annotated[float, typer.Option(min=1, max=1e9, help="Mean of their outputs.")] = 200.0,
    spread: Annotated[float, typer.Option(min=0, max=100, help="Standard deviations of both, in means.")] = 1.0,
    requests: Annotated[int, typer.Option(min=1, max=1_000_000, help="So many, or the first of the trace.")] = 500,
    ttft_slo: Annotated[float, _positive("--ttft-slo", "Promised seconds to the first token.")] = 2.0,
    tbt_slo: Annotated[float, _positive("--tbt-slo", "Promised mean seconds between tokens.")] = 0.05,
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Simulate a cluster: its own schedulers, routing and transfer planning, on devices and links that you describe."""
    _check_together(context)
    spec = _device(device, tflops=tflops, memory_gbps=memory_gbps, memory_gb=memory_gb)
    spec = replace(spec, iteration_s=overhead_ms / 1e3, overlap=overlap)
    link = LinkSpeed(bytes_per_s=link_gbps * _GIGA, latency_s=link_us * 1e-6)
    counts = {
        "prefill.num_workers": prefill,
        "decode.num_workers": workers - 1 if workers else decode,
        "prefill.tensor_parallel": tensor_parallel,
        "decode.tensor_parallel": tensor_parallel,
    }
    plant = _plant(config, model, spec, link, counts)
    for line in (*plant.shortfalls(), *_left_out(plant, config)):
        typer.echo(f"tandem: {line}", err=True)
    rng, slo = random.Random(seed), Slo(ttft_s=ttft_slo, tbt_s=tbt_slo)
    if trace is not None:
        arrivals = from_trace(read_rows(trace, limit=requests), rng, speed=speed, quantum_s=quantum)
    else:
        prompt, output = (Lengths(mean=mean, spread=spread) for mean in (prompt_tokens, output_tokens))
        arrivals = poisson(rng, rate_per_s=rate, num_requests=requests, prompt=prompt, output=output)
    if not arrivals:
        raise ConfigError("there are no requests to simulate", param="trace")
    if workers is None:
        _show_one(plant, arrivals, slo, as_json=as_json)
    else:
        _show_splits(plant, arrivals, slo, num_workers=workers, as_json=as_json)


def _check_together(context: typer.Context) -> None:
    """Raises ConfigError for an option that would be passed over in silence."""
    given = {name for name in context.params if _is_given(context, name)}
    for name, other in _EXCLUDED_BY.items():
        if {name, other} <= given:
            raise ConfigError(f"{_flag(name)} says nothing with {_flag(other)}", param=name)
    for name, other in _NEEDS.items():
        if name in given and other not in given:
            raise ConfigError(f"{_flag(name)} says nothing without {_flag(other)}", param=name)


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _device(name: str, **given: float | None) -> DeviceSpec:
    if name not in DEVICES:
        known = f"one of {', '.join(DEVICES)}, changed by --tflops, --memory-gbps and --memory-gb"
        raise ConfigError(f"device must be {known}, got {name!r}", param="device")
    fields = {"tflops": ("flops_per_s", 1e12), "memory_gbps": ("bytes_per_s", 1e9), "memory_gb": ("memory_bytes", 1e9)}
    changes = {fields[key][0]: value * fields[key][1] for key, value in given.items() if value is not None}
    label = f"{name} (changed)" if changes else name
    return replace(DEVICES[name], name=label, **changes)


def _plant(
    config: Path | None, model: str | None, device: DeviceSpec, link: LinkSpeed, counts: Mapping[str, int | None]
) -> Plant:
    """With a configuration all is as it says; without one, settings that suit the device."""
    given = load_config(config, counts)
    value_bytes = DTYPE_BYTES[given.model.kv_dtype(on_gpu=True)]
    source = model or (_DEFAULT_MODEL if config is None else given.model.source)
    described = describe_model(source, value_bytes=value_bytes)
    if config is None:
        given = config_for(described, device, given)
    return Plant(model=described, device=device, link=link, config=given)


def _left_out(plant: Plant, config: Path | None) -> list[str]:
    """What a file leaves to defaults that were chosen for small models on CPUs; nothing where no setting would do."""
    if config is None:
        return []
    try:
        suited = config_for(plant.model, plant.device, plant.config)
    except ConfigError:
        return []
    fields = left_out(plant.config, fields_in(config), suited=suited)
    if not fields:
        return []
    what = f"{config} leaves out, and a live cluster takes too (in brackets what suits {plant.device.name})"
    return [f"{what}: {', '.join(fields)}"]


def _show_one(plant: Plant, arrivals: Sequence[Arrival], slo: Slo, *, as_json: bool) -> None:
    figures = figures_of(World(plant).run(arrivals), slo)
    if as_json:
        _print_json(figures)
        return
    console = make_console()
    print_plant(plant, console)
    print_figures(figures, console)


def _show_splits(plant: Plant, arrivals: Sequence[Arrival], slo: Slo, *, num_workers: int, as_json: bool) -> None:
    splits = []
    with make_console(stderr=True).status("") as status:
        for split in try_splits(plant, arrivals, num_workers=num_workers, slo=slo):
            splits.append(split)
            status.update(f"{len(splits)} of {num_workers} cuts simulated")
    if as_json:
        _print_json({"splits": {split.label: split.figures for split in splits}, "best": best_of(splits).label})
        return
    console = make_console()
    print_plant(plant, console)
    print_splits(splits, console)


def _print_json(data: object) -> None:
    """What there was none of is null: JSON has neither NaN nor infinity."""
    typer.echo(json.dumps(_finite(data), indent=2))


def _finite(data: object) -> object:
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    return None if isinstance(data, float) and not math.isfinite(data) else data
