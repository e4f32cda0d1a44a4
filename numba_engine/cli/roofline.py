"""``numba-engine roofline``: how fast a model can at best run on a GPU, before there is either."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import psutil
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from numba_engine.backends import create_backend
from numba_engine.checkpoint import Checkpoint, open_checkpoint
from numba_engine.checkpoint.safetensors import read_json
from numba_engine.config import EngineConfig
from numba_engine.errors import CheckpointError, ConfigError
from numba_engine.model.config import ModelConfig
from numba_engine.profiling.hardware import (
    GIB,
    GPUS,
    KV_FORMATS,
    LINK_LATENCY_SOURCE,
    WEIGHT_FORMATS,
    Gpu,
    find_format,
    find_gpu,
    measured_machine,
)
from numba_engine.profiling.roofline import (
    Estimate,
    KVShape,
    MemoryNeed,
    ParameterCount,
    Phase,
    PlannedModel,
    Speculation,
    Transformer,
    Workload,
    estimate,
    estimate_as_json,
    transformer_from_checkpoint,
)
from numba_engine.profiling.tables import format_bytes, format_count, format_time

THIS_MACHINE = "this-machine"
_MIN_WIDTH = 110
_BANDWIDTH_BY = {"datasheet": "datasheet", "measured": "measurement"}
_PLAIN: dict[str, Any] = {"box": None, "pad_edge": False, "header_style": "dim", "title_justify": "left"}


def _parameter_count(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """``8e9``, ``8B``, ``135M``."""
    if value is None:
        return None
    match = re.fullmatch(r"([+-]?\d+(?:\.\d+)?(?:e[+-]?\d{1,3})?)\s*([KMBT]?)", value.strip(), re.IGNORECASE)
    if match is None:
        raise click.BadParameter(f"{value!r} is not a number of parameters such as 8e9, 8B or 135M", ctx, param)
    number = float(match[1]) * 1000 ** " KMBT".index(match[2].upper() or " ")
    if not 1 <= number <= 1e15:
        raise click.BadParameter(f"{value!r} is out of range; 1 to 1e15 parameters are allowed", ctx, param)
    return round(number)


@click.command()
@click.argument("model", required=False)
@click.option(
    "--params", callback=_parameter_count, metavar="N", help="Instead of MODEL, so many parameters (8e9, 8B)."
)
@click.option("--config", metavar="FILE", help="Instead of MODEL, a config.json; weights are not needed.")
@click.option("--num-layers", type=int, metavar="N", help="With --params: layers, for the KV cache and all-reduces.")
@click.option("--hidden-size", type=int, metavar="N", help="With --params: length of the hidden state.")
@click.option("--num-kv-heads", type=int, metavar="N", help="With --params: KV heads.")
@click.option("--head-dim", type=int, metavar="N", help="With --params: length of a head.")
@click.option(
    "--gpu",
    "gpu_names",
    multiple=True,
    metavar="GPU",
    help=f"{', '.join(GPUS)}, or {THIS_MACHINE} (read bandwidth measured now); may be repeated.  [default: all]",
)
@click.option(
    "--weights",
    metavar="FORMAT",
    help=f"{', '.join(WEIGHT_FORMATS)}.  [default: as the checkpoint stores them, else fp16]",
)
@click.option("--kv", default="fp16", show_default=True, metavar="FORMAT", help=f"{', '.join(KV_FORMATS)}.")
@click.option("-b", "--batch", type=int, default=1, show_default=True, metavar="N", help="Sequences at once.")
@click.option(
    "-c",
    "--context",
    type=int,
    default=1024,
    show_default=True,
    metavar="N",
    help="Tokens of each sequence: in the cache while decoding, of the prompt in prefill.",
)
@click.option("--tp", type=int, default=1, show_default=True, metavar="N", help="GPUs that share every matrix.")
@click.option(
    "--speculative-acceptance", type=float, metavar="α", help="Speculative decoding: share of drafted tokens accepted."
)
@click.option("--draft-len", type=int, metavar="γ", help="Tokens drafted a pass.  [default: 4]")
@click.option(
    "--draft-cost", type=float, metavar="c", help="Drafter's pass over the model's, in time.  [default: 0.05]"
)
@click.option("--target", type=float, metavar="TOK/S", help="Say what bandwidth this speed of a sequence needs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: estimates.")
def roofline(
    model: str | None,
    params: int | None,
    config: str | None,
    num_layers: int | None,
    hidden_size: int | None,
    num_kv_heads: int | None,
    head_dim: int | None,
    gpu_names: tuple[str, ...],
    weights: str | None,
    kv: str,
    batch: int,
    context: int,
    tp: int,
    speculative_acceptance: float | None,
    draft_len: int | None,
    draft_cost: float | None,
    target: float | None,
    as_json: bool,
) -> None:
    """Say how fast a model can at best run on a GPU, what bounds it, and what would help.

    MODEL is a Hugging Face directory, a .gguf file, a config.json or the word demo; no weights are loaded. All figures
    are by formula from datasheets: no engine can be faster, and none is this fast.
    """
    sizes = {"num_layers": num_layers, "hidden_size": hidden_size, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    planned = _planned_model(model, params, config, sizes)
    stored = isinstance(planned, Transformer) and planned.stored is not None
    workload = Workload(
        weights=None if weights is None and stored else find_format(weights or "fp16", WEIGHT_FORMATS, "weights"),
        kv=find_format(kv, KV_FORMATS, "kv"),
        batch=batch,
        context=context,
        tp=tp,
        speculation=_speculation(speculative_acceptance, draft_len, draft_cost),
    )
    gpus = [_gpu(name) for name in gpu_names] or [gpu for gpu in GPUS.values() if tp <= gpu.max_gpus]
    if not gpus:
        raise ConfigError(f"no GPU of the table is joined with {tp - 1} others; the most is {_most_gpus()} (tp)")
    estimates = [estimate(planned, gpu, workload, target) for gpu in gpus]
    if as_json:
        click.echo(json.dumps({"estimates": [estimate_as_json(one) for one in estimates]}, ensure_ascii=False))
        return
    # A table that is narrower than its numbers would drop some of them where stdout is a pipe of "80 columns".
    console = Console(width=max(Console().width, _MIN_WIDTH), highlight=False)
    console.print(_title(estimates[0]))
    console.print(_comparison(estimates) if len(estimates) > 1 else _details(estimates[0]))


# ---- what was asked --------------------------------------------------------------------------------------------------


def _planned_model(
    model: str | None, params: int | None, config: str | None, sizes: dict[str, int | None]
) -> PlannedModel:
    if sum(given is not None for given in (model, params, config)) != 1:
        raise click.UsageError("give one of MODEL, --params and --config")
    given = {name: value for name, value in sizes.items() if value is not None}
    if params is not None:
        if given and len(given) < len(sizes):
            missing = ", ".join(f"--{name.replace('_', '-')}" for name in sizes if name not in given)
            raise click.UsageError(f"the shape is given by four options together; missing: {missing}")
        return ParameterCount(params, KVShape(**given) if given else None)
    if given:
        raise click.UsageError("the shape is the model's own; --num-layers and the like go with --params")
    path = Path(config or model or "")
    if config is not None or path.suffix == ".json":
        return _from_config(path)
    if _is_config_alone(path):
        return _from_config(path / "config.json")
    with open_checkpoint(str(model)) as checkpoint:
        return transformer_from_checkpoint(checkpoint)


def _is_config_alone(path: Path) -> bool:
    return path.is_dir() and (path / "config.json").is_file() and not any(path.glob("*.safetensors"))


def _from_config(path: Path) -> Transformer:
    """Shapes alone. What the engine cannot run cannot be read here either; --params takes any model."""
    values = read_json(path)
    checkpoint = Checkpoint("hf", path.parent, name=path.stem, config=values, generation_config={}, tensors={})
    try:
        shapes = ModelConfig.from_checkpoint(checkpoint)
    except CheckpointError as error:
        reason = str(error).removeprefix(f"{path.parent / 'config.json'}: ")
        raise ConfigError(f"{path}: {reason}; any model can be given as --params, with its sizes") from None
    return Transformer(path.resolve().parent.name if path.name == "config.json" else path.stem, shapes)


def _speculation(acceptance: float | None, draft_len: int | None, draft_cost: float | None) -> Speculation | None:
    if acceptance is None:
        if draft_len is not None or draft_cost is not None:
            raise click.UsageError("--draft-len and --draft-cost go with --speculative-acceptance")
        return None
    default = Speculation(acceptance)
    return Speculation(
        acceptance,
        draft_len=default.draft_len if draft_len is None else draft_len,
        draft_cost=default.draft_cost if draft_cost is None else draft_cost,
    )


def _gpu(name: str) -> Gpu:
    if name.lower() != THIS_MACHINE:
        return find_gpu(name)
    backend = create_backend(EngineConfig(backend="cpu"))
    return measured_machine(backend.device_name, backend.read_bandwidth_gbps(), psutil.virtual_memory().total)


def _most_gpus() -> int:
    return max(gpu.max_gpus for gpu in GPUS.values())


# ---- what is shown ---------------------------------------------------------------------------------------------------


def _title(one: Estimate) -> str:
    workload = one.workload
    parts = [
        f"{one.model}: {format_count(one.num_parameters)} parameters",
        f"weights {one.weight_format}, KV {workload.kv.name}",
        f"batch {workload.batch}, context {workload.context:,}",
    ]
    if workload.tp > 1:
        parts.append(f"{workload.tp} GPUs")
    if workload.speculation is not None:
        spec = workload.speculation
        parts.append(f"speculation α {spec.acceptance:g}, γ {spec.draft_len}, c {spec.draft_cost:g}")
    return "; ".join(parts)


def _comparison(estimates: Sequence[Estimate]) -> RenderableType:
    table = _table("bounds by formula from datasheets", "GPU")
    for header in (
        "GB/s",
        "ms/token",
        "decode tok/s",
        "bound",
        "prefill tok/s",
        "ridge",
        "needs",
        "has",
        "fits",
        "J/token",
    ):
        table.add_column(header, justify="right", no_wrap=True)
    for one in estimates:
        table.add_row(
            one.gpu.key,
            f"{one.gpu.bandwidth_gbps:,.0f}",
            f"{one.decode.time_per_token_s * 1e3:.2f}",
            _rate(one.decode.tokens_per_s),
            one.decode.pass_time.bound.value,
            _rate(one.prefill.tokens_per_s),
            _ridge(one),
            format_bytes(round(one.memory.total_bytes)),
            format_bytes(one.memory.available_bytes),
            _yes(one.memory.fits),
            f"{one.joules_per_token:.2f}",
        )
    lines: list[RenderableType] = [table]
    notes = dict.fromkeys(note for one in estimates for note in one.notes)
    lines += [Text(f"note: {note}", style="dim") for note in notes]
    lines.append(
        Text("J/token: estimate from published energies. --gpu NAME shows one in full, with sources.", style="dim")
    )
    return Group(*lines)


def _details(one: Estimate) -> RenderableType:
    parts: list[RenderableType] = [
        "",
        _hardware(one),
        "",
        _phases(one),
        "",
        _memory(one),
        "",
        _levers(one),
        "",
        _energy(one),
    ]
    parts += [Text(f"note: {note}", style="yellow") for note in one.notes]
    return Group(*parts, "", _sources(one))


def _hardware(one: Estimate) -> RenderableType:
    gpu = one.gpu
    rates = (
        ("fp16 tensor", gpu.fp16_tflops),
        ("fp8", gpu.fp8_tflops),
        ("int8", gpu.int8_tops),
        ("fp4", gpu.fp4_tflops),
        ("fp16 shader", gpu.shader_fp16_tflops),
        ("fp32 shader", gpu.shader_fp32_tflops),
    )
    size = f"{gpu.memory_bytes / GIB:.4g} GiB ({format_bytes(gpu.memory_bytes)}) {gpu.memory_kind}"
    facts = [f"{gpu.bandwidth_gbps:,.5g} GB/s by {_BANDWIDTH_BY[gpu.bandwidth_source]}", size]
    if gpu.l2_bytes is not None:
        facts.append(f"L2 {gpu.l2_bytes >> 20} MiB")
    if gpu.tdp_w is not None:
        facts.append(f"{gpu.tdp_w:g} W")
    tflops = [f"{name} {rate:g}" for name, rate in rates if rate is not None]
    lines = [f"{gpu.name}: {', '.join(facts)}"]
    if tflops:
        lines.append(f"dense TFLOPS: {', '.join(tflops)}")
    return Text("\n".join(lines))


def _phases(one: Estimate) -> RenderableType:
    table = _table("bounds, by formula", "phase")
    for header in ("time", "tok/s", "memory", "compute", "links", "bound", "of tensor", "of fp16 shader"):
        table.add_column(header, justify="right", no_wrap=True)
    rows: tuple[tuple[str, float, Phase], ...] = (
        ("decode, a token", one.decode.time_per_token_s, one.decode),
        ("prefill, all prompts", one.prefill.round_s, one.prefill),
    )
    for name, time_s, phase in rows:
        parts = phase.pass_time
        compute = format_time(parts.compute_s) if one.machine_balance is not None else "not known"
        table.add_row(
            name,
            format_time(time_s),
            _rate(phase.tokens_per_s),
            format_time(parts.memory_s),
            compute,
            format_time(parts.link_s) if one.workload.tp > 1 else "",
            parts.bound.value,
            _share(phase.share_of_tensor_peak),
            _share(phase.share_of_shader_fp16_peak),
        )
    demand = one.decode.demand
    moved = f"weights {format_bytes(round(demand.weight_bytes))}, KV {_kv(one.memory, demand.kv_bytes)}"
    lines = [f"a decode pass moves {moved} on each GPU: FLOPs a byte {one.decode_intensity:.3g}"]
    if one.machine_balance is not None:
        lines[0] += f"; the GPU can do {one.machine_balance:.3g}"
        lines.append(
            f"ridge: bound by arithmetic from batch {one.ridge_batch:,}"
            if one.ridge_batch is not None
            else "ridge: none, reading keys and values keeps every batch bound by memory"
        )
    if one.target is not None:
        lines.append(
            f"target: {one.target.tokens_per_s:g} tok/s a sequence needs {one.target.bandwidth_gbps:,.1f} GB/s, "
            f"by bandwidth alone {one.target.num_gpus} of this GPU"
        )
    return Group(table, Text("\n".join(lines)))


def _memory(one: Estimate) -> RenderableType:
    need = one.memory
    verdict = "fits" if need.fits else "does NOT fit"
    lines = [
        f"memory on each GPU: weights {format_bytes(round(need.weight_bytes))} + KV {_kv(need, need.kv_bytes)} = "
        f"{format_bytes(round(need.total_bytes))} of {format_bytes(need.available_bytes)}: {verdict}"
    ]
    if need.max_sequences is not None and need.max_context is not None:
        lines.append(
            f"KV {format_bytes(round(need.kv_bytes_per_token))} a token; at most {need.max_sequences:,} sequences of "
            f"this context, or {need.max_context:,} tokens of context at this batch"
        )
    return Text("\n".join(lines), style="" if need.fits else "bold red")


def _levers(one: Estimate) -> RenderableType:
    table = _table("levers, each by itself, by formula", "lever")
    table.add_column("change", overflow="fold")
    for header in ("phase", "tok/s", "factor", "bound", "needs", "fits"):
        table.add_column(header, justify="right", no_wrap=True)
    for lever in one.levers:
        table.add_row(
            lever.name,
            lever.change,
            lever.metric,
            _rate(lever.tokens_per_s),
            f"{lever.factor:.2f} ×",
            lever.bound.value,
            format_bytes(round(lever.memory_bytes)),
            _yes(lever.fits),
        )
    return table


def _energy(one: Estimate) -> RenderableType:
    table = _table("energy of a generated token: estimates from published figures", "level")
    for header in ("moved or done", "pJ each", "energy", "share"):
        table.add_column(header, justify="right", no_wrap=True)
    for level in one.energy:
        amount = format_bytes(round(level.count)) if level.unit == "bytes" else format_count(round(level.count))
        each = "a bit" if level.unit == "bytes" else "a multiply-add"
        share = level.joules / one.joules_per_token
        table.add_row(level.level, amount, f"{level.picojoules:.3g} {each}", _joules(level.joules), f"{share:.1%}")
    lines = f"together {_joules(one.joules_per_token)}"
    if one.joules_per_token_at_tdp is not None:
        lines += f"; at TDP for the time of a token {_joules(one.joules_per_token_at_tdp)}"
    return Group(table, Text(lines))


def _sources(one: Estimate) -> RenderableType:
    sources = [one.gpu.source]
    sources += [lever.source.removeprefix("by formula, ") for lever in one.levers if lever.source != "by formula"]
    sources += [level.source for level in one.energy]
    if one.workload.tp > 1 or any(lever.name == "tensor parallelism" for lever in one.levers):
        sources.append(LINK_LATENCY_SOURCE)
    grid = Table.grid(padding=(0, 1))
    for number, source in enumerate(dict.fromkeys(sources)):
        grid.add_row("" if number else "sources:", source, style="dim")
    return grid


def _table(title: str, first: str) -> Table:
    table = Table(title=title, **_PLAIN)
    table.add_column(first, no_wrap=True)
    return table


def _rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.1f}" if tokens_per_s < 1000 else f"{tokens_per_s:,.0f}"


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.2%}" if share <= 1 else "> 100%"


def _ridge(one: Estimate) -> str:
    return "-" if one.ridge_batch is None else f"{one.ridge_batch:,}"


def _yes(fits: bool) -> str:
    return "yes" if fits else "NO"


def _kv(need: MemoryNeed, nbytes: float) -> str:
    return format_bytes(round(nbytes)) if need.kv_bytes_per_token else "not counted"


def _joules(joules: float) -> str:
    return f"{joules:.2f} J" if joules >= 1 else f"{joules * 1e3:.1f} mJ"
