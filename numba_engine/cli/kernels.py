"""``numba-engine kernels``: every GPU kernel's card, and what a decode step made of them should take, without a GPU."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from numba_engine.backends.cuda.availability import require_packages
from numba_engine.cli.console import print_json, wide_console
from numba_engine.formats import BF16, FORMATS, Q4_0, Q8_0
from numba_engine.kernel_lab.kernel_model import MODELLED_GPUS, ModelledGpu

if TYPE_CHECKING:
    from numba_engine.kernel_lab.cards import KernelCard
    from numba_engine.kernel_lab.decode_step import ModelStep

_CCS = ("8.0", "8.9", "9.0", "10.0")
_MODELS = ("llama-3-8b", "llama-3.2-1b")
_WIDTH = 180
_FORMATS = tuple(FORMATS)
_PREDICTED = (BF16, Q8_0, Q4_0)


@click.command()
@click.option(
    "--cc",
    "ccs",
    type=click.Choice(_CCS),
    multiple=True,
    default=("9.0",),
    show_default=True,
    help="Compute capability to compile for; may be repeated. Predictions are made of the first.",
)
@click.option(
    "--kernel",
    "wanted",
    metavar="TEXT",
    default="",
    help="Only the cards of kernels with this in their name, such as linear_q4, and no predictions.",
)
@click.option("--cards/--no-cards", "with_cards", default=True, help="The card of every kernel.  [default: cards]")
@click.option("--model", "models", type=click.Choice(_MODELS), multiple=True, default=_MODELS, show_default=True)
@click.option(
    "--format",
    "formats",
    type=click.Choice(_FORMATS, case_sensitive=False),
    multiple=True,
    help="Of weights; may be repeated.  [default: all for cards; BF16, Q8_0 and Q4_0 for predictions]",
)
@click.option("--batch", type=click.IntRange(1, 256), default=1, show_default=True, help="Sequences in the step.")
@click.option("--context", type=click.IntRange(2, 131072), default=512, show_default=True, help="Tokens each sees.")
@click.option("--prompt", type=click.IntRange(1, 4096), help="Predict a prompt of so many tokens, not a decode step.")
@click.option(
    "--gpu",
    "gpu_keys",
    type=click.Choice(tuple(MODELLED_GPUS)),
    multiple=True,
    default=tuple(MODELLED_GPUS),
    show_default=True,
)
@click.option("--fusion/--no-fusion", default=True, help="Fused phases, or the textbook's ops.  [default: fusion]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: cards, steps.")
@click.pass_context
def kernels(
    ctx: click.Context,
    ccs: tuple[str, ...],
    wanted: str,
    with_cards: bool,
    models: tuple[str, ...],
    formats: tuple[str, ...],
    batch: int,
    context: int,
    prompt: int | None,
    gpu_keys: tuple[str, ...],
    fusion: bool,
    as_json: bool,
) -> None:
    """Compile every GPU kernel, assemble it, run it on the PTX executor, and say how good it is.

    Registers, spills, stack, shared memory and occupancy are ptxas's; bytes in flight are read from its machine code;
    coalescing, bank conflicts and reads of each weight byte are counted on slices of a Llama-3-8B layer.

    Then decode steps of whole models are counted launch by launch and their times predicted, for GPUs that are not
    here: by bytes, instructions, bytes in flight, shared memory, tensor cores and waves of blocks. Of a launch some
    blocks are run and scaled up. "/4" are the warp instructions a clock that streaming weights at full bandwidth
    takes.

    The first run compiles every kernel, which takes minutes; --kernel, --model and --format narrow it down. Exits with
    1 if a kernel or a step misses a target; the column "misses" says which.
    """
    require_packages("ptx", ("numba_cuda",), "pip install -e '.[ptx]'")
    from numba_engine.kernel_lab.decode_step import observe_decode, observe_prefill
    from numba_engine.kernel_lab.kernel_cards import kernel_cards
    from numba_engine.kernel_lab.step_tables import step_record

    gpus = [MODELLED_GPUS[key] for key in gpu_keys]
    chosen = [FORMATS[name] for name in _FORMATS if name in formats]
    cards: dict[str, list[KernelCard]] = {}
    for version in ccs if with_cards or wanted else ():
        _say(f"compiling the kernels for {version} and running them on the executor …")
        cards[version] = kernel_cards(_numbers(version), lambda name: wanted in name, chosen or tuple(FORMATS.values()))
    if wanted and not any(cards.values()):
        raise click.UsageError(f"no kernel has {wanted!r} in its name")
    cc = _numbers(ccs[0])
    steps: list[ModelStep] = []
    for model in models if not wanted else ():
        for format in chosen or _PREDICTED:
            _say(f"running the launches of a step of {model} in {format.name} …")
            steps.append(
                observe_decode(model, format, cc, num_seqs=batch, context=context, fusion=fusion)
                if prompt is None
                else observe_prefill(model, format, cc, num_tokens=prompt, fusion=fusion)
            )
    if as_json:
        records = [_record(card) for of_cc in cards.values() for card in of_cc]
        print_json({"cards": records, "steps": [step_record(step, gpus) for step in steps]})
    else:
        _print_cards(cards)
        _print_steps(steps, gpus)
    missed = any(card.misses for of_cc in cards.values() for card in of_cc)
    if missed or any(step.misses(gpu) for step in steps for gpu in gpus):
        ctx.exit(1)


def _say(what: str) -> None:
    click.echo(what, err=True)


def _record(card: KernelCard) -> dict[str, Any]:
    return {**dataclasses.asdict(card), "misses": list(card.misses)}


def _print_cards(cards: dict[str, list[KernelCard]]) -> None:
    for cc, of_cc in cards.items():
        wide_console(_WIDTH).print(f"compute capability {cc}", _table(of_cc), "")


def _print_steps(steps: list[ModelStep], gpus: list[ModelledGpu]) -> None:
    from numba_engine.kernel_lab.step_tables import launch_table, step_name, step_table

    console = wide_console(_WIDTH)
    for step in steps:
        console.print(f"predicted: {step_name(step)}", launch_table(step, gpus), "")
    if steps:
        console.print("predicted", step_table(steps, gpus), "")
    for step in steps:
        if step.is_decode:
            console.print(f"{step_name(step)}, {gpus[0].gpu.key}: {step.issue_sum(gpus[0])}")


def _table(cards: list[KernelCard]) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name in ("kernel", "misses") else "right", no_wrap=True)
    for card in cards:
        table.add_row(
            card.kernel,
            str(card.threads),
            str(card.registers),
            f"{card.spill_bytes}/{card.stack_bytes}",
            str(card.shared_bytes),
            f"{card.occupancy:.0%}",
            f"{card.bytes_in_flight / 1e3:.0f} KB",
            f"{card.f64}/{card.local}/{card.calls}",
            _optional(card.wide_weight_share, "{:.1%}"),
            _optional(card.weight_reads, "{:.3f}"),
            _optional(card.instructions_per_weight_byte, "{:.3f}"),
            f"{card.sector_efficiency:.3f}",
            f"{card.bank_conflict_factor:.3f}",
            ", ".join(card.misses),
        )
    return table


_COLUMNS = (
    "kernel",
    "threads",
    "regs",
    "spill/stack",
    "shared",
    "occ.",
    "in flight",
    "f64/local/call",
    "128-bit",
    "reads",
    "instr/B",
    "sectors",
    "conflicts",
    "misses",
)


def _numbers(cc: str) -> tuple[int, int]:
    major, minor = cc.split(".")
    return int(major), int(minor)


def _optional(value: float | None, format: str) -> str:
    return "" if value is None else format.format(value)
