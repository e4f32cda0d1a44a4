"""``numba-engine model-info``: what a checkpoint holds, as the engine sees it."""

from __future__ import annotations

import dataclasses
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from numba_engine.cli.console import print_json
from numba_engine.cli.loading import load
from numba_engine.cli.options import engine_config, engine_options


@click.command("model-info")
@click.argument("model")
@engine_options
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def model_info(model: str, as_json: bool, **options: Any) -> None:
    """Load a model and say what it is and how it would run here."""
    info = dataclasses.asdict(load(model, engine_config(options)).model_info)
    if as_json:
        print_json(info)
        return
    table = Table(show_header=False, box=None)
    for name, value in info.items():
        table.add_row(name, _readable(name, value))
    Console(soft_wrap=True).print(table)


def _readable(name: str, value: Any) -> str:
    if name == "weight_bytes":
        return f"{value:,} ({value / 1e6:,.1f} MB)"
    if isinstance(value, tuple):
        return ", ".join(str(item) for item in value)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
