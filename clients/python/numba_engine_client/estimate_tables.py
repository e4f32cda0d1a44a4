"""What the planner says, laid out for a terminal: one GPU in full, or several side by side."""

from __future__ import annotations

from collections.abc import Sequence

from numba_engine_api.v1 import inference_pb2 as pb
from numba_engine_client.tables import aligned, counted, duration, enum_word, rate, size


def estimate_tables(estimates: Sequence[pb.ThroughputEstimate]) -> str:
    """Estimates of one model and workload."""
    return "\n".join(
        [_title(estimates[0]), "", *(_comparison(estimates) if len(estimates) > 1 else _full(estimates[0]))]
    )


def _title(one: pb.ThroughputEstimate) -> str:
    gpus = f"; {one.tensor_parallel} GPUs" if one.tensor_parallel > 1 else ""
    return (
        f"{one.model}: {one.num_parameters / 1e9:,.3g} G parameters; weights {one.weight_format}, KV {one.kv_format}; "
        f"batch {one.batch}, context {one.context:,}{gpus}"
    )


def _comparison(estimates: Sequence[pb.ThroughputEstimate]) -> list[str]:
    rows = [("GPU", "GB/s", "ms/token", "tok/s", "bound", "prefill", "ridge", "needs", "has", "J/token", "")]
    for one in estimates:
        rows.append(
            (
                one.gpu.key,
                f"{one.gpu.peaks[0].value:,.0f}",
                f"{one.decode.time_per_token_s * 1e3:.2f}",
                rate(one.decode.tokens_per_s),
                _bound(one.decode.bound),
                rate(one.prefill.tokens_per_s) if one.HasField("prefill") else "not known",
                f"{one.ridge_batch:,}" if one.HasField("ridge_batch") else "-",
                size(one.memory.total_bytes),
                size(one.memory.available_bytes),
                f"{one.joules_per_token:.2f}",
                "" if one.memory.fits else "does NOT fit",
            )
        )
    notes = dict.fromkeys(note for one in estimates for note in one.notes)
    return [
        *aligned(rows),
        *(f"note: {note}" for note in notes),
        "bounds by formula from datasheets; energy: estimates",
    ]


def _full(one: pb.ThroughputEstimate) -> list[str]:
    target = one.target
    lines = [*_gpu(one.gpu), "", *_phases(one)]
    if one.HasField("target"):
        lines.append(
            f"{target.tokens_per_s:g} tok/s a sequence needs {target.bandwidth_gbps:,.1f} GB/s: "
            f"by bandwidth alone {target.num_gpus} of this GPU"
        )
    lines += [*_memory(one.memory), "", *_levers(one.levers), "", *_energy(one)]
    lines += [f"note: {note}" for note in one.notes]
    sources = [one.gpu.peaks[0].citation, *(lever.source for lever in one.levers), *(e.source for e in one.energy)]
    return [*lines, "", "sources", *(f"  {source}" for source in dict.fromkeys(sources) if source != "by formula")]


def _gpu(gpu: pb.PlannedGpu) -> list[str]:
    bandwidth, *rates = gpu.peaks
    by = enum_word(pb.FigureSource, bandwidth.source, "FIGURE_SOURCE_")
    lines = [f"{gpu.name}: {bandwidth.value:,.5g} GB/s ({by}), {size(gpu.memory_bytes)} {gpu.memory_kind}"]
    if rates:
        lines.append("dense TFLOPS: " + ", ".join(f"{peak.name} {peak.value:.5g}" for peak in rates))
    return lines


def _phases(one: pb.ThroughputEstimate) -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("bounds, by formula", "time", "tok/s", "memory", "compute", "links", "bound", "of tensor", "")
    ]
    phases = [("decode, a token", one.decode.time_per_token_s, one.decode)]
    if one.HasField("prefill"):
        phases.append(("prefill, all prompts", one.prefill.pass_s, one.prefill))
    for name, time_s, phase in phases:
        share = f"{phase.share_of_tensor_peak:.2%}" if phase.HasField("share_of_tensor_peak") else ""
        rows.append(
            (
                name,
                duration(time_s),
                rate(phase.tokens_per_s),
                duration(phase.memory_s),
                duration(phase.compute_s) if one.HasField("machine_balance") else "not known",
                duration(phase.link_s) if phase.link_s else "",
                _bound(phase.bound),
                share,
                "",
            )
        )
    if not one.HasField("prefill"):
        rows.append(("prefill, all prompts", "not known", *[""] * 7))
    lines = [*aligned(rows), ""]
    if one.HasField("machine_balance"):
        lines.append(
            f"ridge: bound by arithmetic from batch {one.ridge_batch:,}"
            if one.HasField("ridge_batch")
            else "ridge: none, reading keys and values keeps every batch bound by memory"
        )
    return lines


def _memory(need: pb.MemoryNeed) -> list[str]:
    kv = size(need.kv_bytes) if need.kv_bytes_per_token else "not counted"
    lines = [
        f"memory on each GPU: weights {size(need.weight_bytes)} + KV {kv} = {size(need.total_bytes)} "
        f"of {size(need.available_bytes)}: {'fits' if need.fits else 'does NOT fit'}"
    ]
    if need.HasField("max_sequences"):
        lines.append(
            f"at most {counted(need.max_sequences, 'sequence')} of this context, "
            f"or {need.max_context:,} tokens of context at this batch"
        )
    return lines


def _levers(levers: Sequence[pb.Lever]) -> list[str]:
    rows = [("levers, each by itself", "of", "tok/s", "factor", "bound", "needs", "change")]
    for lever in levers:
        fits = "" if lever.fits else " (does NOT fit)"
        figures = (lever.metric, rate(lever.tokens_per_s), f"{lever.factor:.2f} ×", _bound(lever.bound))
        rows.append((lever.name, *figures, size(lever.memory_bytes), f"{lever.change}{fits}"))
    return aligned(rows)


def _energy(one: pb.ThroughputEstimate) -> list[str]:
    rows = [("energy of a token, estimated", "moved or done", "pJ each", "energy", "share", "")]
    for level in one.energy:
        amount = size(level.count) if level.unit == "bytes" else f"{level.count / 1e9:,.3g} G"
        each = "a bit" if level.unit == "bytes" else "a multiply-add"
        share = f"{level.joules / one.joules_per_token:.1%}"
        rows.append((level.level, amount, f"{level.picojoules:.3g} {each}", _joules(level.joules), share, ""))
    total = f"together {_joules(one.joules_per_token)}"
    if one.HasField("joules_per_token_at_tdp"):
        total += f"; at TDP for the time of a token {_joules(one.joules_per_token_at_tdp)}"
    return [*aligned(rows), total]


def _joules(joules: float) -> str:
    return f"{joules:.2f} J" if joules >= 1 else f"{joules * 1e3:.1f} mJ"


def _bound(bound: pb.Bound) -> str:
    return enum_word(pb.Bound, bound, "BOUND_")
