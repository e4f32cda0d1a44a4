"""A predicted step as plain values and as tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from numba_engine.kernel_lab.decode_step import ModelStep
from numba_engine.kernel_lab.kernel_model import ModelledGpu


def step_record(step: ModelStep, gpus: Sequence[ModelledGpu]) -> dict[str, Any]:
    """For JSON. Times and shares are predictions, everything else was counted."""
    return {
        "model": step.model,
        "format": step.format.name,
        "num_seqs": step.num_seqs,
        "query_len": step.query_len,
        "context": step.context,
        "num_launches": step.num_launches,
        "moved_bytes": step.moved_bytes,
        "moved_over_once": step.moved_over_once,
        "bank_conflict_factor": step.bank_conflict_factor,
        "spill_bytes": step.spill_bytes,
        "warp_instructions_per_weight_byte": step.instructions_per_weight_byte,
        "predicted": {gpu.gpu.key: _predicted(step, gpu) for gpu in gpus},
    }


def _predicted(step: ModelStep, gpu: ModelledGpu) -> dict[str, Any]:
    time_s = step.time_s(gpu)
    launches = [
        {
            "op": launch.op,
            "kernel": launch.observed.kernel.name,
            "count": launch.count,
            "num_blocks": launch.observed.num_blocks,
            "memory_bytes": launch.memory_bytes,
            **asdict(prediction),
        }
        for launch, prediction in zip(step.launches, step.predictions(gpu), strict=True)
    ]
    return {
        "time_s": time_s,
        "tokens_per_s": step.num_tokens / time_s,
        "tflops": step.flops / time_s / 1e12,
        "memory_share": step.memory_share(gpu),
        "issue_slots": step.issue_sum(gpu).slots,
        "misses": list(step.misses(gpu)),
        "launches": launches,
    }


def launch_table(step: ModelStep, gpus: Sequence[ModelledGpu]) -> Table:
    """A row a launch: what it is, and for each GPU its time, its share of the bandwidth and what binds it.

    In flight are the bytes of one multiprocessor, on the GPU where they are most.
    """
    table = _table(("op", "kernel", "times", "blocks", "regs", "MB", "instr/B", "in flight"), left=2)
    for gpu in gpus:
        table.add_column(gpu.gpu.key, justify="left", no_wrap=True)
    predictions = [step.predictions(gpu) for gpu in gpus]
    for launch, *of_gpus in zip(step.launches, *predictions, strict=True):
        per_byte = launch.instructions_per_weight_byte
        table.add_row(
            launch.op,
            launch.observed.kernel.name,
            str(launch.count),
            str(launch.observed.num_blocks),
            str(launch.observed.assembled.registers),
            f"{launch.memory_bytes / 1e6:.2f}",
            "" if per_byte is None or launch.weight_bytes < 1 << 20 else f"{per_byte:.3f}",
            f"{max(p.in_flight_bytes for p in of_gpus) / 1e3:.0f} KB",
            *(f"{p.time_s * 1e6:6.1f} µs {p.memory_share:4.0%} {p.bound}" for p in of_gpus),
        )
    return table


def step_table(steps: Sequence[ModelStep], gpus: Sequence[ModelledGpu]) -> Table:
    """A row a step: what was counted, and for each GPU tokens a second, share of the bandwidth and issue slots."""
    table = _table(("step", "launches", "bytes", "conflicts", "spills", "instr/B"), left=1)
    for gpu in gpus:
        table.add_column(gpu.gpu.key, justify="left", no_wrap=True)
    table.add_column("misses", justify="left", no_wrap=True)
    for step in steps:
        misses = dict.fromkeys(miss for gpu in gpus for miss in step.misses(gpu))
        table.add_row(
            step_name(step),
            str(step.num_launches),
            f"{step.moved_over_once:.4f}",
            f"{step.bank_conflict_factor:.3f}",
            str(step.spill_bytes),
            f"{step.instructions_per_weight_byte:.4f}",
            *(_of_gpu(step, gpu) for gpu in gpus),
            ", ".join(misses),
        )
    return table


def _of_gpu(step: ModelStep, gpu: ModelledGpu) -> str:
    rate = f"{step.tokens_per_s(gpu):5.0f} tok/s"
    if not step.is_decode:
        return f"{rate} {step.flops / step.time_s(gpu) / 1e12:4.0f} TFLOPS"
    return f"{rate} {step.memory_share(gpu):4.0%} {step.issue_sum(gpu).slots:4.1f}/4"


def step_name(step: ModelStep) -> str:
    what = f"decode {step.num_seqs} × {step.context}" if step.is_decode else f"prompt of {step.context}"
    return f"{step.model} {step.format.name} {what}"


def _table(names: Sequence[str], *, left: int) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))
    for index, name in enumerate(names):
        table.add_column(name, justify="left" if index < left else "right", no_wrap=True)
    return table
