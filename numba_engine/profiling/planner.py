"""The roofline planner for programs: everything by name and number, and all wrong arguments named in one error."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import psutil

from numba_engine.checkpoint.safetensors import parse_json_object
from numba_engine.errors import CheckpointError, ConfigError, FieldViolation, InvalidRequestError
from numba_engine.outputs import ModelInfo
from numba_engine.profiling.hardware import (
    GPUS,
    KV_FORMATS,
    WEIGHT_FORMATS,
    Gpu,
    MeasuredArithmetic,
    find_format,
    find_gpu,
    measured_machine,
    stored_format,
)
from numba_engine.profiling.planned_model import KVShape, ParameterCount, PlannedModel
from numba_engine.profiling.planned_transformer import Transformer, transformer_from_config
from numba_engine.profiling.report import Peaks
from numba_engine.profiling.roofline import Estimate, estimate, require_target, with_target
from numba_engine.profiling.workload import Speculation, Workload

THIS_MACHINE = "this-machine"
MAX_GPUS = 64
"""In one call of ``estimate_throughput``."""
_SHAPE = tuple(field.name for field in fields(KVShape))


def estimate_throughput(
    model: PlannedModel,
    gpus: Sequence[str] = (),
    *,
    weight_format: str | None = None,
    kv_format: str | None = None,
    batch: int | None = None,
    context: int | None = None,
    tensor_parallel: int | None = None,
    acceptance: float | None = None,
    draft_len: int | None = None,
    draft_cost: float | None = None,
    target_tokens_per_s: float | None = None,
    this_machine: Gpu | None = None,
) -> list[Estimate]:
    """How fast a model can at best run on each GPU; of the whole table where none is named.

    What is None is as ``numba-engine roofline`` takes it: weights as the model stores them, else fp16; one sequence of
    1,024 tokens on one GPU. ``acceptance`` is that of speculative decoding. ``this_machine`` is what the GPU name
    ``this-machine`` stands for.

    Raises:
        InvalidRequestError: naming every argument that is wrong, those of speculation as ``speculation.acceptance``
            and so on, a GPU as ``gpus[0]``.
    """
    check = _Checks()
    sizes: dict[str, Any] = {"batch": batch, "context": context, "tp": tensor_parallel}
    sizes = {name: value for name, value in sizes.items() if value is not None}
    for name, value in sizes.items():
        with check("tensor_parallel" if name == "tp" else name):
            Workload(**{name: value})
    weights = None
    if weight_format is not None or not _is_stored(model):
        with check("weight_format"):
            weights = find_format(weight_format or "fp16", WEIGHT_FORMATS, "weights")
    kv = KV_FORMATS["fp16"]
    if kv_format is not None:
        with check("kv_format"):
            kv = find_format(kv_format, KV_FORMATS, "kv")
    speculation = _speculation(check, acceptance, draft_len, draft_cost)
    if target_tokens_per_s is not None:
        with check("target_tokens_per_s"):
            require_target(target_tokens_per_s)
    machines = _machines(check, gpus, this_machine)
    check.raise_if_any()

    workload = Workload(weights=weights, kv=kv, speculation=speculation, **sizes)
    with check("tensor_parallel"):
        chosen = machines or gpus_that_join(workload.tp)
        estimates = [estimate(model, gpu, workload) for gpu in chosen]
    check.raise_if_any()
    if target_tokens_per_s is not None:
        with check("target_tokens_per_s"):
            estimates = [with_target(one, target_tokens_per_s) for one in estimates]
        check.raise_if_any()
    return estimates


def gpus_that_join(num_gpus: int) -> list[Gpu]:
    """Of the table, those that can be joined with enough others. Raises ConfigError where there are none."""
    gpus = [gpu for gpu in GPUS.values() if num_gpus <= gpu.max_gpus]
    if not gpus:
        most = max(gpu.max_gpus for gpu in GPUS.values())
        raise ConfigError(f"no GPU of the table is joined with {num_gpus - 1} others; the most is {most} (tp)")
    return gpus


def model_of_config(text: str) -> PlannedModel:
    """The model that a config.json describes. Raises InvalidRequestError, naming ``config_json``."""
    file = "config.json"
    try:
        return transformer_from_config(parse_json_object(text.encode(errors="surrogatepass"), file), file)
    except (CheckpointError, ConfigError) as error:
        raise InvalidRequestError(FieldViolation("config_json", str(error).removeprefix(f"{file}: "))) from None


def model_of_size(num_parameters: int, **shape: int) -> PlannedModel:
    """A model of which no more is known. ``shape``: all fields of ``KVShape``, or none.

    Raises:
        InvalidRequestError: naming every argument that is wrong.
    """
    check = _Checks()
    with check("num_parameters"):
        ParameterCount(num_parameters)
    missing = [name for name in _SHAPE if name not in shape]
    if shape and missing:
        check.violations += [FieldViolation(name, "goes with the other sizes: all four, or none") for name in missing]
    for name, value in shape.items():
        with check(name):
            KVShape(**{**dict.fromkeys(_SHAPE, 1), name: value})
    check.raise_if_any()
    return ParameterCount(num_parameters, KVShape(**shape) if shape else None)


def machine_of(model: ModelInfo, peaks: Peaks) -> Gpu | None:
    """What a loaded model runs on, for the planner; None for a GPU that is simulated or not in the table, and where the
    bandwidth could not be measured (0)."""
    if not peaks.read_bandwidth_gbps:
        return None
    if model.backend == "cpu":
        arithmetic = stored_format(model.weight_formats[0]).arithmetic
        measured = MeasuredArithmetic(peaks.gflops / 1e3, peaks.arithmetic, arithmetic) if peaks.gflops else None
        memory_bytes = psutil.virtual_memory().total
        return measured_machine(model.device_name, peaks.read_bandwidth_gbps, memory_bytes, measured)
    if model.backend != "cuda":
        return None
    try:
        gpu = find_gpu(model.device_name)
    except ConfigError:
        return None
    source = f"read bandwidth measured here; {gpu.source}"
    return replace(gpu, bandwidth_gbps=peaks.read_bandwidth_gbps, bandwidth_source="measured", source=source)


# ---- parts of estimate_throughput ------------------------------------------------------------------------------------


class _Checks:
    """Gathers what is wrong, so that one error names it all."""

    def __init__(self) -> None:
        self.violations: list[FieldViolation] = []

    @contextmanager
    def __call__(self, field: str) -> Iterator[None]:
        try:
            yield
        except ConfigError as error:
            self.violations.append(FieldViolation(field, re.sub(r"^[\w ]+ (?=must be )", "", str(error))))

    def raise_if_any(self) -> None:
        if self.violations:
            raise InvalidRequestError(*self.violations)


def _is_stored(model: PlannedModel) -> bool:
    return isinstance(model, Transformer) and model.stored is not None


def _speculation(
    check: _Checks, acceptance: float | None, draft_len: int | None, draft_cost: float | None
) -> Speculation | None:
    given: dict[str, Any] = {"acceptance": acceptance, "draft_len": draft_len, "draft_cost": draft_cost}
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        return None
    if acceptance is None:
        check.violations.append(FieldViolation("speculation.acceptance", "is required"))
        return None
    before = len(check.violations)
    for name, value in given.items():
        with check(f"speculation.{name}"):
            Speculation(**{"acceptance": 0.0, name: value})
    return Speculation(**given) if len(check.violations) == before else None


def _machines(check: _Checks, names: Sequence[str], this_machine: Gpu | None) -> list[Gpu]:
    if len(names) > MAX_GPUS:
        check.violations.append(FieldViolation("gpus", f"must be at most {MAX_GPUS}, got {len(names)}"))
        return []
    machines = []
    for index, name in enumerate(names):
        with check(f"gpus[{index}]"):
            if name.lower() != THIS_MACHINE:
                machines.append(find_gpu(name))
            elif this_machine is not None:
                machines.append(this_machine)
            else:
                raise ConfigError("this machine's GPU is simulated, not in the table, or too full to be measured")
    return machines
