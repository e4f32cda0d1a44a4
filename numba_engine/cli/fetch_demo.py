"""``numba-engine fetch-demo``: the demo model, downloaded once."""

from __future__ import annotations

import click

from numba_engine.checkpoint import demo
from numba_engine.cli.loading import ProgressBar


@click.command("fetch-demo")
@click.option("-q", "--quiet", is_flag=True, help="No progress on stderr.")
def fetch_demo(quiet: bool) -> None:
    """Download the demo model (SmolLM2-135M-Instruct, 98 MB) unless it is there, and print its path."""
    with ProgressBar(quiet=quiet) as progress:
        path = demo.fetch_demo(progress)
    click.echo(path)
