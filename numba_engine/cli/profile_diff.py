"""``numba-engine profile diff``: two saved profiles side by side."""

from __future__ import annotations

from pathlib import Path

import click

from numba_engine.cli.console import print_json, wide_console
from numba_engine.profiling.diff import diff_as_json, diff_profiles, diff_tables
from numba_engine.profiling.saved_profile import read_profile

_PROFILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command("diff")
@click.argument("a", type=_PROFILE, metavar="A.json")
@click.argument("b", type=_PROFILE, metavar="B.json")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: model, summary, ops.")
def profile_diff(a: Path, b: Path, as_json: bool) -> None:
    """Compare two profiles written by `numba-engine profile MODEL --json`.

    Times are per token, so that runs of different lengths compare. Where B is faster, the change is negative and B / A
    below 1.
    """
    diff = diff_profiles(read_profile(a), read_profile(b))
    if as_json:
        print_json(diff_as_json(diff))
    else:
        wide_console().print(diff_tables(diff, str(a), str(b)))
