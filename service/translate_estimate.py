"""The planner's estimates between the API's messages and the engine's values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from numba_engine import (
    Estimate,
    FieldViolation,
    Gpu,
    InvalidRequestError,
    Lever,
    MemoryNeed,
    PlanBound,
    PlannedModel,
    PlannedPhase,
    estimate_throughput,
    machine_of,
    model_of_config,
    model_of_size,
)
from numba_engine.profiling import ProfileSession
from numba_engine_api.v1 import inference_pb2 as api


def estimated(session: ProfileSession, request: api.EstimateThroughputRequest) -> api.EstimateThroughputResponse:
    """Takes a moment for many GPUs. Raises InvalidRequestError, naming every field that is wrong."""
    speculation = request.speculation if request.HasField("speculation") else None
    estimates = estimate_throughput(
        _model(session, request),
        request.gpus,
        weight_format=request.weight_format or None,
        kv_format=request.kv_format or None,
        batch=_optional(request, "batch"),
        context=_optional(request, "context"),
        tensor_parallel=_optional(request, "tensor_parallel"),
        acceptance=speculation.acceptance if speculation is not None else None,
        draft_len=_optional(speculation, "draft_len") if speculation is not None else None,
        draft_cost=_optional(speculation, "draft_cost") if speculation is not None else None,
        target_tokens_per_s=_optional(request, "target_tokens_per_s"),
        this_machine=machine_of(session.llm.model_info, session.peaks),
    )
    return api.EstimateThroughputResponse(estimates=map(_to_estimate, estimates))


def _model(session: ProfileSession, request: api.EstimateThroughputRequest) -> PlannedModel:
    match request.WhichOneof("model"):
        case "config_json":
            return model_of_config(request.config_json)
        case "size":
            return _model_of_size(request.size)
        case _:
            return session.planned_model


def _model_of_size(size: api.ModelSize) -> PlannedModel:
    shape = {field.name: getattr(size, field.name) for field, _ in size.ListFields() if field.has_presence}
    try:
        return model_of_size(size.num_parameters, **shape)
    except InvalidRequestError as error:
        raise InvalidRequestError(
            *(FieldViolation(f"size.{v.field}", v.description) for v in error.violations)
        ) from None


def _optional(message: api.EstimateThroughputRequest | api.Speculation, field: str) -> Any:
    return getattr(message, field) if message.HasField(field) else None


def _to_estimate(one: Estimate) -> api.ThroughputEstimate:
    return api.ThroughputEstimate(
        model=one.model,
        num_parameters=one.num_parameters,
        weight_format=one.weight_format,
        kv_format=one.workload.kv.name,
        batch=one.workload.batch,
        context=one.workload.context,
        tensor_parallel=one.workload.tp,
        gpu=_to_gpu(one.gpu),
        decode=_to_phase(one.decode),
        prefill=_to_phase(one.prefill) if one.prefill is not None else None,
        memory=_to_memory_need(one.memory),
        machine_balance=one.machine_balance,
        decode_intensity=one.decode_intensity,
        ridge_batch=one.ridge_batch,
        levers=map(_to_lever, one.levers),
        energy=(api.EnergyLevel(**dataclasses.asdict(level)) for level in one.energy),
        joules_per_token=one.joules_per_token,
        joules_per_token_at_tdp=one.joules_per_token_at_tdp,
        target=api.ThroughputTarget(**dataclasses.asdict(one.target)) if one.target else None,
        notes=one.notes,
    )


_TFLOPS = {
    "fp16 tensor cores": "fp16_tflops",
    "fp8": "fp8_tflops",
    "int8": "int8_tops",
    "fp4": "fp4_tflops",
    "fp16 outside the tensor cores": "shader_fp16_tflops",
    "fp32 outside the tensor cores": "shader_fp32_tflops",
}


def _to_gpu(gpu: Gpu) -> api.PlannedGpu:
    return api.PlannedGpu(
        key=gpu.key,
        name=gpu.name,
        memory_bytes=gpu.memory_bytes,
        memory_kind=gpu.memory_kind,
        peaks=_to_peaks(gpu),
        l2_bytes=gpu.l2_bytes,
        tdp_w=gpu.tdp_w,
    )


def _to_peaks(gpu: Gpu) -> Iterator[api.DevicePeak]:
    by = api.FIGURE_SOURCE_MEASURED if gpu.bandwidth_source == "measured" else api.FIGURE_SOURCE_DATASHEET
    yield api.DevicePeak(name="bandwidth", value=gpu.bandwidth_gbps, unit="GB/s", source=by, citation=gpu.source)
    for name, field in _TFLOPS.items():
        if (value := getattr(gpu, field)) is not None:
            by = api.FIGURE_SOURCE_DATASHEET
            yield api.DevicePeak(name=name, value=value, unit="TFLOPS", source=by, citation=gpu.source)
    if (measured := gpu.measured) is not None:
        by = api.FIGURE_SOURCE_MEASURED
        yield api.DevicePeak(
            name=measured.instruction, value=measured.tflops, unit="TFLOPS", source=by, citation=gpu.source
        )


_BOUND = {
    PlanBound.MEMORY: api.BOUND_MEMORY,
    PlanBound.COMPUTE: api.BOUND_COMPUTE,
    PlanBound.INTERCONNECT: api.BOUND_INTERCONNECT,
}
assert len(_BOUND) == len(PlanBound)


def _to_phase(phase: PlannedPhase) -> api.PhaseEstimate:
    return api.PhaseEstimate(
        time_per_token_s=phase.time_per_token_s,
        tokens_per_s=phase.tokens_per_s,
        pass_s=phase.round_s,
        bound=_BOUND[phase.pass_time.bound],
        memory_s=phase.pass_time.memory_s,
        compute_s=phase.pass_time.compute_s,
        link_s=phase.pass_time.link_s,
        weight_bytes=phase.demand.weight_bytes,
        kv_bytes=phase.demand.kv_bytes,
        flops=phase.demand.flops,
        share_of_tensor_peak=phase.share_of_tensor_peak,
        share_of_shader_fp16_peak=phase.share_of_shader_fp16_peak,
    )


def _to_memory_need(need: MemoryNeed) -> api.MemoryNeed:
    return api.MemoryNeed(**dataclasses.asdict(need), total_bytes=need.total_bytes, fits=need.fits)


def _to_lever(lever: Lever) -> api.Lever:
    return api.Lever(**dataclasses.asdict(lever) | {"bound": _BOUND[lever.bound]})
