"""Profiles between the API's messages and the engine's values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from numba_engine import (
    LLM,
    CountedTraffic,
    EngineStats,
    FieldViolation,
    InvalidRequestError,
    ModelInfo,
    OpBound,
    OpCall,
    OpProfile,
    Peaks,
    ProfileSummary,
    SamplingParams,
    TimeSource,
    ValidRequest,
    longest_context,
)
from numba_engine.profiling import (
    ProfiledStep,
    ProfileEnd,
    ProfileEvent,
    ProfileSession,
    ProfileStarted,
    ProfileWaiting,
    ProfileWork,
    random_requests,
)
from numba_engine_api.v1 import inference_pb2 as api
from service import translate
from service.engine_loop import MAX_CALLS

_DEFAULT_NUM_TOKENS = 32
_DEFAULT_PROMPT_LEN = 512
_DEFAULT_LIVE_STEPS = 100
# Of each step the engine keeps a few kilobytes until the end of the profile.
_MAX_NUM_TOKENS = 16384
_MAX_LIVE_STEPS = 16384
_MAX_WARM_UP_STEPS = 1000

# ---------------------------------------------------------------- requests


def prepared(llm: LLM, limits: EngineStats, request: api.ProfileRequest) -> ProfileWork:
    """What the request wants to be profiled. Takes long for long prompts.

    Raises:
        InvalidRequestError: after every check that the engine makes.
        NoChatTemplateError
    """
    if violations := [*_violations(llm, limits, request)]:
        raise InvalidRequestError(*violations)
    num_tokens = request.num_tokens if request.HasField("num_tokens") else _DEFAULT_NUM_TOKENS
    # Greedy and past end tokens, so that a profile does the same work each time.
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_tokens)
    steps_together = None
    match kind := translate.input_of(request):
        case "live":
            requests: Sequence[ValidRequest] = ()
        case "synthetic":
            num_seqs, prompt_len = _sizes(request.synthetic)
            # The first of them goes on until all have decoded together.
            params, steps_together = dataclasses.replace(params, max_tokens=None), num_tokens
            requests = random_requests(llm, [prompt_len] * num_seqs, params)
        case _:
            requests = [translate.to_valid(llm, request, params)]
    lengths = [len(request.token_ids) for request in requests]
    return ProfileWork(
        requests=requests,
        fusion=request.fusion if request.HasField("fusion") else True,
        wants_text=kind not in ("live", "synthetic"),
        steps_together=steps_together,
        live_steps=_live_steps(request.live) if kind == "live" else None,
        warm_up_steps=request.warm_up_steps,
        warm_up_requests=random_requests(llm, lengths, params) if request.warm_up_steps else (),
        with_steps=request.detail != api.PROFILE_DETAIL_SUMMARY,
        with_timeline=request.detail == api.PROFILE_DETAIL_TIMELINE,
        unprofiled_every=request.unprofiled_every,
    )


def _violations(llm: LLM, limits: EngineStats, request: api.ProfileRequest) -> Iterator[FieldViolation]:
    kind = translate.input_of(request)
    if request.HasField("num_tokens"):
        if kind == "live":
            yield FieldViolation("num_tokens", "goes with a prompt, not with live traffic; give live.num_steps")
        elif not 1 <= request.num_tokens <= _MAX_NUM_TOKENS:
            yield FieldViolation("num_tokens", f"must be 1 to {_MAX_NUM_TOKENS}, got {request.num_tokens}")
    if request.detail not in api.ProfileDetail.values():
        yield FieldViolation("detail", f"{request.detail} is no ProfileDetail")
    if request.warm_up_steps > _MAX_WARM_UP_STEPS:
        yield FieldViolation("warm_up_steps", f"must be at most {_MAX_WARM_UP_STEPS}, got {request.warm_up_steps}")
    if request.unprofiled_every == 1:
        yield FieldViolation("unprofiled_every", "must be 0 (none) or at least 2, for some steps must be profiled")
    if kind == "live" and not 1 <= _live_steps(request.live) <= _MAX_LIVE_STEPS:
        yield FieldViolation("live.num_steps", f"must be 1 to {_MAX_LIVE_STEPS}, got {request.live.num_steps}")
    if kind == "synthetic":
        yield from _synthetic_violations(llm, limits, request)


def _synthetic_violations(llm: LLM, limits: EngineStats, request: api.ProfileRequest) -> Iterator[FieldViolation]:
    num_seqs, prompt_len = _sizes(request.synthetic)
    num_tokens = request.num_tokens if request.HasField("num_tokens") else _DEFAULT_NUM_TOKENS
    fits = True
    if not 1 <= num_seqs <= limits.max_num_seqs:
        fits = False
        yield FieldViolation(
            "synthetic.num_seqs", f"must be 1 to {limits.max_num_seqs} (the server's max_num_seqs), got {num_seqs}"
        )
    if prompt_len < 1:
        fits = False
        yield FieldViolation("synthetic.prompt_len", "must be at least 1, got 0")
    budget = llm.max_num_batched_tokens
    if fits and num_seqs > budget:
        fits = False
        yield FieldViolation(
            "synthetic.num_seqs", f"must be 1 to {budget} (the server's max_num_batched_tokens), got {num_seqs}"
        )
    length = longest_context(num_seqs if fits else 1, prompt_len, num_tokens, budget)
    context = llm.model_info.max_model_len
    if length > context:
        fits = False
        yield FieldViolation(
            "synthetic.prompt_len",
            f"with num_tokens the first sequence comes to {length} tokens until all have decoded together, "
            f"but the context holds {context}",
        )
    blocks = num_seqs * -(-length // limits.block_size)
    if fits and blocks > limits.num_kv_blocks:
        yield FieldViolation(
            "synthetic",
            f"needs {blocks} KV blocks of {limits.block_size} tokens, but the server has {limits.num_kv_blocks}: "
            "profile fewer or shorter sequences, or start the server with a larger --kv-cache-bytes",
        )


def _sizes(synthetic: api.SyntheticWorkload) -> tuple[int, int]:
    """(sequences, tokens of each prompt)"""
    return (
        synthetic.num_seqs if synthetic.HasField("num_seqs") else 1,
        synthetic.prompt_len if synthetic.HasField("prompt_len") else _DEFAULT_PROMPT_LEN,
    )


def _live_steps(live: api.LiveTraffic) -> int:
    return live.num_steps if live.HasField("num_steps") else _DEFAULT_LIVE_STEPS


# ---------------------------------------------------------------- responses


def to_responses(session: ProfileSession, event: ProfileEvent) -> Iterator[api.ProfileResponse]:
    match event:
        case ProfileStarted(peaks, time_source):
            yield api.ProfileResponse(device=_to_device(session.llm.model_info, peaks, time_source))
            yield api.ProfileResponse(model=_to_model(session))
        case ProfileWaiting(num_steps):
            yield api.ProfileResponse(waiting=api.WaitingForTraffic(num_steps=num_steps))
        case ProfiledStep():
            yield api.ProfileResponse(step=_to_step(event, session.peaks))
        case ProfileEnd():
            yield api.ProfileResponse(summary=_to_summary(event, session.peaks))


_TIME_SOURCE = {
    TimeSource.HOST_CLOCK: api.TIME_SOURCE_HOST_CLOCK,
    TimeSource.EVENTS: api.TIME_SOURCE_DEVICE_EVENTS,
    TimeSource.CUPTI: api.TIME_SOURCE_DEVICE_ACTIVITY,
    TimeSource.SIMULATED: api.TIME_SOURCE_SIMULATED,
}
assert len(_TIME_SOURCE) == len(TimeSource)

_BOUND = {
    OpBound.MEMORY: api.BOUND_MEMORY,
    OpBound.COMPUTE: api.BOUND_COMPUTE,
    OpBound.LATENCY: api.BOUND_LATENCY,
}
assert len(_BOUND) == len(OpBound)


def _to_device(info: ModelInfo, peaks: Peaks, time_source: TimeSource) -> api.ProfiledDevice:
    return api.ProfiledDevice(
        backend=info.backend,
        name=info.device_name,
        num_threads=info.num_threads,
        time_source=_TIME_SOURCE[time_source],
        peaks=_to_peaks(peaks),
        peaks_of=peaks.device,
    )


def _to_peaks(peaks: Peaks) -> Iterator[api.DevicePeak]:
    yield _to_peak("read bandwidth", peaks.read_bandwidth_gbps, "GB/s", peaks.read_bandwidth_source)
    if peaks.gflops is not None:
        yield _to_peak(peaks.arithmetic, peaks.gflops / 1e3, "TFLOPS", peaks.gflops_source)


def _to_peak(name: str, value: float, unit: str, source: str) -> api.DevicePeak:
    is_measured = source == "measured"
    return api.DevicePeak(
        name=name,
        value=value,
        unit=unit,
        source=api.FIGURE_SOURCE_MEASURED if is_measured else api.FIGURE_SOURCE_DATASHEET,
        citation=source,
    )


def _to_model(session: ProfileSession) -> api.ProfiledModel:
    info = session.llm.model_info
    return api.ProfiledModel(
        name=info.name,
        architecture=info.architecture,
        num_parameters=info.num_parameters,
        weight_bytes=info.weight_bytes,
        weight_formats=info.weight_formats,
        activation_dtype=info.activation_dtype,
        kv_cache_dtype=info.kv_cache_dtype,
        kv_bytes_per_token=info.kv_bytes_per_token,
        weight_bytes_per_token=(
            api.NamedBytes(name=name, num_bytes=num_bytes) for name, num_bytes in session.weight_bytes_per_token.items()
        ),
    )


def _to_step(told: ProfiledStep, peaks: Peaks) -> api.StepProfile:
    step = told.profile
    return api.StepProfile(
        index=step.index,
        num_prefill_tokens=step.num_prefill_tokens,
        num_decode_tokens=step.num_decode_tokens,
        num_seqs=step.num_seqs,
        time_s=step.time_s,
        ops=(_to_op(op, peaks) for op in step.ops),
        text=told.text,
        overhead_s=step.overhead_s,
        calls=map(_to_call, step.timeline[:MAX_CALLS]),
        calls_left_out=max(len(step.timeline) - MAX_CALLS, 0),
        unprofiled=not step.profiled,
        launch_gap_s=step.launch_gap_s,
        arithmetic_idle_share=step.arithmetic_idle_share(peaks),
    )


def _to_call(call: OpCall) -> api.OpCall:
    return api.OpCall(**dataclasses.asdict(call))


def _to_op(op: OpProfile, peaks: Peaks) -> api.OpProfile:
    is_known = op.time_s > 0 and peaks.read_bandwidth_gbps > 0
    return api.OpProfile(
        name=op.name,
        num_calls=op.num_calls,
        time_s=op.time_s,
        weight_bytes=op.weight_bytes,
        kv_bytes=op.kv_bytes,
        activation_bytes=op.activation_bytes,
        flops=op.flops,
        gbps=op.gbps,
        kv_written_bytes=op.kv_written_bytes,
        activation_written_bytes=op.activation_written_bytes,
        intensity=op.intensity,
        share_of_attainable=op.share_of_attainable(peaks) if is_known else None,
        bound=_BOUND[op.bound(peaks)] if is_known else api.BOUND_UNSPECIFIED,
        num_launches=op.num_launches,
        counted=_to_counted(op.counted) if op.counted else None,
    )


def _to_counted(counted: CountedTraffic) -> api.CountedTraffic:
    return api.CountedTraffic(
        dram=api.BytesByKind(**dataclasses.asdict(counted.dram)),
        l2=api.BytesByKind(**dataclasses.asdict(counted.l2)),
        lanes=api.BytesByKind(**dataclasses.asdict(counted.lanes)),
        shared_bytes=counted.shared_bytes,
        shared_wavefronts=counted.shared_wavefronts,
        shared_wavefronts_ideal=counted.shared_wavefronts_ideal,
        warp_instructions=counted.warp_instructions,
        lane_instructions=counted.lane_instructions,
    )


_SUMMARY_FIELDS = (
    "num_prefill_steps",
    "num_decode_steps",
    "prefill_tokens_per_s",
    "decode_tokens_per_s",
    "read_bandwidth_gbps",
    "bytes_per_token",
    "floor_s",
    "share_of_floor",
    "weight_bytes_per_token",
    "kv_bytes_per_token",
    "overhead_s_per_step",
    "decode_tokens_per_s_p10",
    "decode_tokens_per_s_p90",
    "prefill_tokens_per_s_p10",
    "prefill_tokens_per_s_p90",
    "decode_arithmetic_idle_share",
    "prefill_arithmetic_idle_share",
    "launches_per_step",
    "launch_gap_s_per_step",
    "host_s_per_step",
    "num_unprofiled_steps",
    "unprofiled_step_s",
    "profiled_step_s",
    "profiled_ops_s",
    "decode_seqs",
)
"""Plain numbers, of the same name on both sides."""


def _to_summary(end: ProfileEnd, peaks: Peaks) -> api.ProfileSummary:
    summary: ProfileSummary = end.summary
    return api.ProfileSummary(
        **{name: getattr(summary, name) for name in _SUMMARY_FIELDS},
        ops=(_to_op(op, peaks) for op in summary.ops),
        shares=map(_to_share, summary.shares),
        prefill_ops=(_to_op(op, peaks) for op in summary.prefill_ops),
        prefill_shares=map(_to_share, summary.prefill_shares),
        finish_reason=translate.FINISH_REASON[end.finish_reason] if end.finish_reason else None,
        usage=translate.to_usage(end.usage),
        memory=api.MemoryUse(**dataclasses.asdict(summary.memory)) if summary.memory else None,
    )


def _to_share(share: tuple[str, float]) -> api.OpShare:
    return api.OpShare(name=share[0], share=share[1])
