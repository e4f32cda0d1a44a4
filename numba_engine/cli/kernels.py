"""``numba-engine kernels``: every GPU kernel's card, without a GPU."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from numba_engine.backends.cuda.availability import require_packages
from numba_engine.cli.console import wide_console

if TYPE_CHECKING:
    from numba_engine.backends.cuda.cards import KernelCard

_CCS = ("8.0", "8.9", "9.0", "10.0")


@click.command()
@click.option(
    "--cc", "ccs", type=click.Choice(_CCS), multiple=True, help="Compute capability; may be repeated.  [default: all]"
)
@click.option(
    "--kernel", "wanted", metavar="TEXT", default="", help="Only kernels with this in their name, such as linear_q4."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: cards.")
@click.pass_context
def kernels(ctx: click.Context, ccs: tuple[str, ...], wanted: str, as_json: bool) -> None:
    """Compile every GPU kernel, assemble it, run it on the PTX executor, and say how good it is.

    Registers, spills, stack, shared memory and occupancy are ptxas's; coalescing, bank conflicts and reads of each
    weight byte are counted on slices of a Llama-3-8B layer. Exits with 1 if a kernel misses a target; its column
    "misses" says which.
    """
    require_packages("ptx", ("numba_cuda",), "pip install 'numba-engine[ptx]'")
    from numba_engine.backends.cuda.cards import kernel_cards

    cards = {cc: kernel_cards(_numbers(cc), lambda name: wanted in name) for cc in ccs or _CCS}
    if not any(cards.values()):
        raise click.UsageError(f"no kernel has {wanted!r} in its name")
    if as_json:
        records = [_record(card) for of_cc in cards.values() for card in of_cc]
        click.echo(json.dumps({"cards": records}))
    else:
        for cc, of_cc in cards.items():
            wide_console().print(f"compute capability {cc}", _table(of_cc), "")
    if any(card.misses for of_cc in cards.values() for card in of_cc):
        ctx.exit(1)


def _record(card: KernelCard) -> dict[str, Any]:
    return {**dataclasses.asdict(card), "misses": list(card.misses)}


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
            f"{card.f64}/{card.local}/{card.calls}",
            _share(card.wide_weight_share),
            "" if card.weight_reads is None else f"{card.weight_reads:.3f}",
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
    "f64/local/call",
    "128-bit",
    "reads",
    "sectors",
    "conflicts",
    "misses",
)


def _numbers(cc: str) -> tuple[int, int]:
    major, minor = cc.split(".")
    return int(major), int(minor)


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"
