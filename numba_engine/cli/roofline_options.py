"""The model and the workload that ``numba-engine roofline`` is asked about."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from numba_engine.checkpoint import open_checkpoint
from numba_engine.checkpoint.safetensors import read_json
from numba_engine.cli.options import Command, add_options
from numba_engine.errors import ConfigError
from numba_engine.profiling.hardware import KV_FORMATS, WEIGHT_FORMATS, find_format
from numba_engine.profiling.planned_model import KVShape, ParameterCount, PlannedModel
from numba_engine.profiling.planned_transformer import Transformer, transformer_from_checkpoint, transformer_from_config
from numba_engine.profiling.workload import Speculation, Workload

_SIZES = ("num_layers", "hidden_size", "num_kv_heads", "head_dim")


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


_MODEL_OPTIONS = (
    click.argument("model", required=False),
    click.option(
        "--params", callback=_parameter_count, metavar="N", help="Instead of MODEL, so many parameters (8e9, 8B)."
    ),
    click.option("--config", metavar="FILE", help="Instead of MODEL, a config.json; weights are not needed."),
    click.option(
        "--num-layers", type=int, metavar="N", help="With --params: layers, for the KV cache and all-reduces."
    ),
    click.option("--hidden-size", type=int, metavar="N", help="With --params: length of the hidden state."),
    click.option("--num-kv-heads", type=int, metavar="N", help="With --params: KV heads."),
    click.option("--head-dim", type=int, metavar="N", help="With --params: length of a head."),
)

_WORKLOAD_OPTIONS = (
    click.option(
        "--weights",
        metavar="FORMAT",
        help=f"{', '.join(WEIGHT_FORMATS)}.  [default: as the checkpoint stores them, else fp16]",
    ),
    click.option("--kv", default="fp16", show_default=True, metavar="FORMAT", help=f"{', '.join(KV_FORMATS)}."),
    click.option("-b", "--batch", type=int, default=1, show_default=True, metavar="N", help="Sequences at once."),
    click.option(
        "-c",
        "--context",
        type=int,
        default=1024,
        show_default=True,
        metavar="N",
        help="Tokens of each sequence: in the cache while decoding, of the prompt in prefill.",
    ),
    click.option("--tp", type=int, default=1, show_default=True, metavar="N", help="GPUs that share every matrix."),
    click.option(
        "--speculative-acceptance",
        type=float,
        metavar="α",
        help="Speculative decoding: share of drafted tokens accepted.",
    ),
    click.option("--draft-len", type=int, metavar="γ", help="Tokens drafted a pass.  [default: 4]"),
    click.option(
        "--draft-cost", type=float, metavar="c", help="Drafter's pass over the model's, in time.  [default: 0.05]"
    ),
)


def planned_model_options(command: Command) -> Command:
    """Add MODEL, --params and the sizes that go with it, and --config."""
    return add_options(command, _MODEL_OPTIONS)


def workload_options(command: Command) -> Command:
    """Add the fields of ``Workload``."""
    return add_options(command, _WORKLOAD_OPTIONS)


def planned_model(options: Mapping[str, Any]) -> PlannedModel:
    """The one model that was given.

    Raises:
        click.UsageError: unless exactly one is given, or with an incomplete shape.
        ConfigError, CheckpointError: it cannot be read, or planned.
    """
    model, params, config = options["model"], options["params"], options["config"]
    if sum(given is not None for given in (model, params, config)) != 1:
        raise click.UsageError("give one of MODEL, --params and --config")
    sizes = {name: options[name] for name in _SIZES if options[name] is not None}
    if params is not None:
        return ParameterCount(params, _shape(sizes) if sizes else None)
    if sizes:
        raise click.UsageError("the shape is the model's own; --num-layers and the like go with --params")
    path = Path(config or model)
    if config is not None or path.suffix == ".json":
        return _from_config(path)
    if _is_config_alone(path):
        return _from_config(path / "config.json")
    with open_checkpoint(model) as checkpoint:
        return transformer_from_checkpoint(checkpoint)


def workload_of(model: PlannedModel, options: Mapping[str, Any]) -> Workload:
    """How the model is to be run; a checkpoint's weights stay as they are stored unless a format is given.

    Raises:
        click.UsageError: a draft without an acceptance rate.
        ConfigError: naming what is out of range, or the known formats.
    """
    weights = options["weights"]
    keep_stored = weights is None and isinstance(model, Transformer) and model.stored is not None
    return Workload(
        weights=None if keep_stored else find_format(weights or "fp16", WEIGHT_FORMATS, "weights"),
        kv=find_format(options["kv"], KV_FORMATS, "kv"),
        batch=options["batch"],
        context=options["context"],
        tp=options["tp"],
        speculation=_speculation(options["speculative_acceptance"], options["draft_len"], options["draft_cost"]),
    )


def _shape(sizes: Mapping[str, int]) -> KVShape:
    missing = ", ".join(f"--{name.replace('_', '-')}" for name in _SIZES if name not in sizes)
    if missing:
        raise click.UsageError(f"the shape is given by four options together; missing: {missing}")
    return KVShape(**sizes)


def _is_config_alone(path: Path) -> bool:
    return path.is_dir() and (path / "config.json").is_file() and not any(path.glob("*.safetensors"))


def _from_config(path: Path) -> Transformer:
    """Shapes alone."""
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    try:
        return transformer_from_config(read_json(path), name)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}; any model can be given as --params, with its sizes") from None


def _speculation(acceptance: float | None, draft_len: int | None, draft_cost: float | None) -> Speculation | None:
    given: dict[str, Any] = {"draft_len": draft_len, "draft_cost": draft_cost}
    given = {name: value for name, value in given.items() if value is not None}
    if acceptance is not None:
        return Speculation(acceptance, **given)
    if given:
        raise click.UsageError("--draft-len and --draft-cost go with --speculative-acceptance")
    return None
