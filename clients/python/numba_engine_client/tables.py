"""What the service says, laid out for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from numba_engine_api.v1 import inference_pb2 as pb
from numba_engine_client.results import Generation

_BAR_WIDTH = 24


def summary_line(generation: Generation) -> str:
    """What a generation read and wrote, and how fast."""
    usage, timings = generation.usage, generation.timings
    cached = f" ({usage.cached_prompt_tokens} cached)" if usage.cached_prompt_tokens else ""
    # The first token belongs to the prompt's time, so n tokens make n - 1 intervals.
    rate = f", {(usage.completion_tokens - 1) / timings.decode_s:.1f} tok/s" if timings.decode_s > 0 else ""
    return (
        f"prompt: {usage.prompt_tokens} tokens{cached}, first token after {timings.ttft_s:.3f} s; "
        f"output: {usage.completion_tokens} tokens{rate}; finished by {generation.finish_reason}"
    )


def step_line(step: pb.StepProfile, *, is_first: bool) -> str:
    """One step of a profile; the first one under its headings."""
    num_bytes = sum(op.weight_bytes + op.kv_bytes + op.activation_bytes for op in step.ops)
    gbps = num_bytes / step.time_s / 1e9 if step.time_s else 0.0
    heading = f"{'step':>5} {'prefill':>8} {'decode':>7} {'ms':>9} {'MB':>9} {'GB/s':>7}  text\n" if is_first else ""
    return (
        f"{heading}{step.index:>5} {step.num_prefill_tokens:>8} {step.num_decode_tokens:>7} {step.time_s * 1e3:>9.2f} "
        f"{num_bytes / 1e6:>9.1f} {gbps:>7.1f}  {step.text!r}"
    )


def profile_table(device: pb.ProfiledDevice, model: pb.ProfiledModel, summary: pb.ProfileSummary) -> str:
    """The summary of a profile: the machine, the limit, and each op's share of a decode step's time."""
    steps = max(summary.num_decode_steps, 1)
    shares = {share.name: share.share for share in summary.shares}
    ops = {op.name: op for op in summary.ops}
    rows = [("op", "calls", "ms/step", "MB/step", "GB/s", "MFLOP/step", "share", "")]
    for name, share in shares.items():
        op = ops.get(name)
        bar = "█" * round(share * _BAR_WIDTH)
        if op is None:
            rows.append((name, "", "", "", "", "", f"{share:.1%}", bar))
            continue
        num_bytes = op.weight_bytes + op.kv_bytes + op.activation_bytes
        rows.append(
            (
                name,
                f"{op.num_calls / steps:g}",
                f"{op.time_s / steps * 1e3:.3f}",
                f"{num_bytes / steps / 1e6:.2f}",
                f"{op.gbps:.1f}",
                f"{op.flops / steps / 1e6:.1f}",
                f"{share:.1%}",
                bar,
            )
        )
    clock = pb.TimeSource.Name(device.time_source).removeprefix("TIME_SOURCE_").lower().replace("_", " ")
    floor = f"{1 / summary.floor_s:.1f} tok/s" if summary.floor_s else "unknown"
    return "\n".join(
        [
            "",
            f"{model.name} ({model.architecture}, {model.num_parameters / 1e6:,.0f} M parameters, "
            f"{model.weight_bytes / 1e6:,.1f} MB as {', '.join(model.weight_formats)})",
            f"on {device.backend}: {device.name}; times by {clock}, bytes by formula",
            "",
            *_aligned(rows),
            "",
            f"prefill {summary.prefill_tokens_per_s:.1f} tok/s in {_counted(summary.num_prefill_steps, 'step')}, "
            f"decode {summary.decode_tokens_per_s:.1f} tok/s (median of {_counted(summary.num_decode_steps, 'step')})",
            f"a token moves {summary.bytes_per_token / 1e6:.1f} MB; at the {summary.read_bandwidth_gbps:.1f} GB/s "
            f"this machine reads, the limit is {floor}: {summary.share_of_floor:.0%} of it reached",
        ]
    )


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def fields_table(fields: Mapping[str, Any]) -> str:
    """Nested fields as ``name.inner  value`` lines."""
    return "\n".join(_aligned([*_flat(fields)], first_left=2))


def _flat(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            yield f"{prefix}{name}", ", ".join(str(item) for item in value)
        elif isinstance(value, int) and not isinstance(value, bool):
            yield f"{prefix}{name}", f"{value:,}"
        else:
            yield f"{prefix}{name}", f"{value:.6g}" if isinstance(value, float) else str(value)


def _aligned(rows: Sequence[Sequence[str]], *, first_left: int = 1) -> list[str]:
    """Columns of equal width: the first ``first_left`` and the last to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    lefts = {*range(first_left), len(widths) - 1}
    return [
        "  ".join(
            cell.ljust(width) if column in lefts else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
