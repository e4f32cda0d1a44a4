"""``numba-engine roofline``: how fast a model can at best run on a GPU, before there is either."""

from __future__ import annotations

from typing import Any

import click
import psutil

from numba_engine.backends import create_backend
from numba_engine.cli.console import print_json, wide_console
from numba_engine.cli.roofline_options import planned_model, planned_model_options, workload_of, workload_options
from numba_engine.config import EngineConfig
from numba_engine.formats import BF16, F16, F32, Q8_0, Format
from numba_engine.profiling.estimate_tables import estimate_tables
from numba_engine.profiling.exports import estimate_as_json
from numba_engine.profiling.hardware import (
    GPUS,
    Gpu,
    MeasuredArithmetic,
    NumberFormat,
    find_gpu,
    measured_machine,
    stored_format,
)
from numba_engine.profiling.planner import THIS_MACHINE, gpus_that_join
from numba_engine.profiling.roofline import estimate, with_target


@click.command()
@planned_model_options
@click.option(
    "--gpu",
    "gpu_names",
    multiple=True,
    metavar="GPU",
    help=f"{', '.join(GPUS)}, or {THIS_MACHINE} (measured now); may be repeated.  [default: all]",
)
@workload_options
@click.option("--target", type=float, metavar="TOK/S", help="Say what bandwidth this speed of a sequence needs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: estimates.")
def roofline(gpu_names: tuple[str, ...], target: float | None, as_json: bool, **options: Any) -> None:
    """Say how fast a model can at best run on a GPU, what bounds it, and what would help.

    MODEL is a Hugging Face directory, a .gguf file, a config.json or the word demo; no weights are loaded. All figures
    are by formula from datasheets: no engine can be faster, and none is this fast.
    """
    model = planned_model(options)
    workload = workload_of(model, options)
    weights = model.weight_format(workload)
    gpus = [_gpu(name, weights) for name in gpu_names] or gpus_that_join(workload.tp)
    estimates = [estimate(model, gpu, workload) for gpu in gpus]
    if target is not None:
        estimates = [with_target(one, target) for one in estimates]
    if as_json:
        print_json({"estimates": [estimate_as_json(one) for one in estimates]})
    else:
        wide_console().print(estimate_tables(estimates))


def _gpu(name: str, weights: NumberFormat) -> Gpu:
    if name.lower() != THIS_MACHINE:
        return find_gpu(name)
    backend = create_backend(EngineConfig(backend="cpu"))
    format = _format_like(weights)
    peak = backend.peak_gflops(format)
    measured = None
    if peak is not None:
        gflops, instruction = peak
        measured = MeasuredArithmetic(gflops / 1e3, instruction, stored_format(format.name).arithmetic)
    memory_bytes = psutil.virtual_memory().total
    return measured_machine(backend.device_name, backend.read_bandwidth_gbps(), memory_bytes, measured)


def _format_like(weights: NumberFormat) -> Format:
    """One that the engine multiplies as it would these."""
    if weights.arithmetic == "int8":
        return Q8_0
    if weights.arithmetic == "fp32":
        return F32
    return BF16 if weights.name.lower().startswith("bf16") else F16
