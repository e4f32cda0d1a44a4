"""``numba-engine profile``: where each token's time and bytes go."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.live import Live

from numba_engine.cli.console import print_json, to_json, wide_console
from numba_engine.cli.loading import load
from numba_engine.cli.options import engine_config, engine_options
from numba_engine.cli.profile_diff import profile_diff
from numba_engine.cli.prompt import prompt_options, read_prompt
from numba_engine.engine.llm import LLM
from numba_engine.errors import ConfigError
from numba_engine.outputs import ModelInfo
from numba_engine.profiling.bench import check_fits
from numba_engine.profiling.exports import profile_as_json, steps_as_csv
from numba_engine.profiling.html_report import render_html
from numba_engine.profiling.plots import require_matplotlib
from numba_engine.profiling.profile_run import ProfiledStep, ProfileEnd, ProfileRun, ProfileWork
from numba_engine.profiling.report import ProfileSummary, StepProfile
from numba_engine.profiling.session import ProfileSession
from numba_engine.profiling.synthetic import longest_context, random_requests
from numba_engine.profiling.tables import format_bytes, format_count, step_table, summary_table
from numba_engine.profiling.trace import profile_as_trace
from numba_engine.sampling_params import SamplingParams

_DEFAULT_PROMPT = "The capital of France is"
_UNPROFILED_EVERY = 4
"""Decode steps between those that run without a profile, to tell what looking costs."""


class _ProfileCommand(click.Command):
    """``profile diff A B`` is a command of its own; with any other word, that word is the model."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if args[:1] == [profile_diff.name]:
            return profile_diff.make_context(f"{info_name} {profile_diff.name}", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


def _new_file(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """Known before the model is loaded, not after it has run."""
    if value is not None and not value.parent.is_dir():
        raise click.BadParameter(f"there is no directory {str(value.parent)!r}", ctx, param)
    if value is not None and param.name == "html":
        require_matplotlib()
    return value


def _sizes(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, int] | None:
    """``4x512``: four sequences of 512 tokens."""
    if value is None:
        return None
    match = re.fullmatch(r"([1-9]\d{0,8})x([1-9]\d{0,8})", value.strip(), re.IGNORECASE)
    if match is None:
        raise click.BadParameter(f"{value!r} is no number of sequences and tokens such as 4x512", ctx, param)
    return int(match[1]), int(match[2])


_FILE = click.Path(dir_okay=False, writable=True, path_type=Path)


@click.command(cls=_ProfileCommand)
@click.argument("model")
@prompt_options
@click.option(
    "--synthetic",
    callback=_sizes,
    metavar="SEQSxTOKENS",
    help="Instead of a prompt, so many sequences at once of so many random tokens each, such as 4x512. "
    "Decode figures are of the steps that have all of them.",
)
@click.option(
    "-n",
    "--max-tokens",
    type=click.IntRange(1),
    default=32,
    show_default=True,
    metavar="N",
    help="Tokens to generate; with --synthetic, decode steps of all sequences together.",
)
@click.option(
    "--warm-up",
    "warm_up_steps",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    metavar="STEPS",
    help="Run first, with random prompts as long, and not reported.",
)
@click.option("--fusion/--no-fusion", default=True, help="Fused phases, or the textbook ops one by one.")
@engine_options
@click.option("--html", type=_FILE, callback=_new_file, metavar="FILE", help="Write a report with plots, in one file.")
@click.option("--trace", type=_FILE, callback=_new_file, metavar="FILE", help="Write a trace for ui.perfetto.dev.")
@click.option("--csv", type=_FILE, callback=_new_file, metavar="FILE", help="Write a line per step and op.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: model, steps, summary.")
@click.option("-q", "--quiet", is_flag=True, help="No progress and no live table on stderr.")
def profile(
    model: str,
    prompt: str | None,
    prompt_file: str | None,
    chat: str | None,
    system: str | None,
    synthetic: tuple[int, int] | None,
    max_tokens: int,
    warm_up_steps: int,
    fusion: bool,
    html: Path | None,
    trace: Path | None,
    csv: Path | None,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Measure every step of a generation, op by op.

    It decodes greedily and past end tokens, so that the work is the same each time. While it runs, the current step
    is shown on stderr where that is a terminal; the summary is printed to stdout. --no-fusion shows the textbook ops.

    `numba-engine profile diff A.json B.json` compares two profiles that were written with --json.
    """
    if synthetic and any(given is not None for given in (prompt, prompt_file, chat, system)):
        raise click.UsageError("--synthetic stands instead of a prompt")
    text = read_prompt(prompt, prompt_file, chat, system, default=_DEFAULT_PROMPT)
    # The first of several sequences goes on until all have decoded together for so many steps.
    params = SamplingParams(temperature=0.0, max_tokens=None if synthetic else max_tokens, ignore_eos=True)
    llm = load(model, engine_config(options), quiet=quiet)
    if synthetic:
        _check_fits(llm, *synthetic, max_tokens)
        requests = random_requests(llm, [synthetic[1]] * synthetic[0], params)
    else:
        requests = [llm.validate(text.token_ids(llm), params)]
    lengths = [len(request.token_ids) for request in requests]
    work = ProfileWork(
        requests,
        fusion=fusion,
        steps_together=max_tokens if synthetic else None,
        warm_up_steps=warm_up_steps,
        warm_up_requests=random_requests(llm, lengths, params) if warm_up_steps else (),
        with_timeline=html is not None or trace is not None,
        unprofiled_every=_UNPROFILED_EVERY,
    )
    steps, summary = _run(ProfileRun(ProfileSession(llm), "profile", work), quiet=quiet)

    for file in _write_files(llm.model_info, steps, summary, html, trace, csv):
        if not quiet:
            click.echo(f"wrote {file}", err=True)
    if as_json:
        print_json(profile_as_json(llm.model_info, steps, summary))
        return
    click.echo(_title(llm.model_info))
    wide_console().print(summary_table(summary))


def _check_fits(llm: LLM, num_seqs: int, prompt_len: int, num_steps: int) -> None:
    """Raises ConfigError unless the engine can decode such sequences together for so many steps."""
    budget = llm.max_num_batched_tokens
    if num_seqs > budget:
        raise ConfigError(f"max_num_batched_tokens is {budget}, but {num_seqs} sequences are to run at once")
    check_fits(llm, longest_context(num_seqs, prompt_len, num_steps, budget), num_seqs)


def _run(run: ProfileRun, *, quiet: bool) -> tuple[list[StepProfile], ProfileSummary]:
    """To its end, with the current step on stderr."""
    steps = []
    errors = Console(stderr=True)
    with Live(console=errors, transient=True, auto_refresh=False) as live, closing(run.events()) as events:
        for event in events:
            match event:
                case ProfiledStep(step):
                    steps.append(step)
                    if errors.is_terminal and not quiet:
                        live.update(step_table(step), refresh=True)
                case ProfileEnd(summary):
                    return steps, summary
    raise AssertionError("the last event is the end")


def _write_files(
    model: ModelInfo,
    steps: list[StepProfile],
    summary: ProfileSummary,
    html: Path | None,
    trace: Path | None,
    csv: Path | None,
) -> Iterator[Path]:
    """Write what was asked for; yields each file when it is there."""
    if html is not None:
        html.write_text(render_html(model, steps, summary), encoding="utf-8")
        yield html
    if trace is not None:
        trace.write_text(to_json(profile_as_trace(model, steps, summary)), encoding="utf-8")
        yield trace
    if csv is not None:
        csv.write_text(steps_as_csv(steps, summary.peaks), encoding="utf-8")
        yield csv


def _title(info: ModelInfo) -> str:
    formats = ", ".join(info.weight_formats)
    return (
        f"{info.name} ({info.architecture}, {format_count(info.num_parameters)} parameters, "
        f"{format_bytes(info.weight_bytes)} as {formats}) on {info.backend}: {info.device_name}; "
        f"{info.activation_dtype} activations, {info.kv_cache_dtype} KV cache"
    )
