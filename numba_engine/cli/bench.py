"""``numba-engine bench``: tokens per second, in the rows and columns of llama-bench, and the bandwidth they mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from numba_engine.cli.console import print_json
from numba_engine.cli.loading import load
from numba_engine.cli.options import engine_config, engine_options, execution_options
from numba_engine.outputs import ModelInfo
from numba_engine.profiling.bench import BenchRow, run_bench
from numba_engine.profiling.exports import bench_as_json
from numba_engine.profiling.session import ProfileSession

_COLUMNS = ("model", "size", "params", "backend", "threads", "test", "t/s", "GB/s", "of read bandwidth")


@click.command()
@click.argument("model")
@click.option("-p", "--prompt-tokens", type=click.IntRange(0), default=512, show_default=True, help="Prefill so many.")
@click.option("-n", "--gen-tokens", type=click.IntRange(0), default=128, show_default=True, help="Decode so many.")
@click.option("-r", "--repetitions", type=click.IntRange(1), default=5, show_default=True)
@click.option("-d", "--depth", type=click.IntRange(0), default=0, show_default=True, help="Context before decoding.")
@click.option("-b", "--batch", type=click.IntRange(1), default=1, show_default=True, help="Sequences at once.")
@engine_options
@execution_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: model, rows.")
@click.option("-q", "--quiet", is_flag=True, help="No progress on stderr.")
def bench(
    model: str,
    prompt_tokens: int,
    gen_tokens: int,
    repetitions: int,
    depth: int,
    batch: int,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Measure prompt processing (pp) and text generation (tg).

    GB/s counts the weights and keys and values that were moved, by formula; its share is of the plain read
    bandwidth measured on this machine with the same threads.
    """
    if not (prompt_tokens or gen_tokens):
        raise click.UsageError("--prompt-tokens 0 and --gen-tokens 0 leave nothing to measure")
    llm = load(model, engine_config(options), quiet=quiet)
    rows = run_bench(
        ProfileSession(llm),
        prompt_tokens=prompt_tokens,
        gen_tokens=gen_tokens,
        repetitions=repetitions,
        depth=depth,
        batch=batch,
    )
    if as_json:
        print_json(bench_as_json(llm.model_info, rows))
    else:
        click.echo(_markdown(llm.model_info, rows))


def _markdown(info: ModelInfo, rows: Sequence[BenchRow]) -> str:
    model = f"{info.architecture} {info.name} {info.weight_formats[0]}"
    fixed = (
        model,
        f"{info.weight_bytes / 2**20:.2f} MiB",
        f"{info.num_parameters / 1e6:.2f} M",
        info.backend,
        str(info.num_threads),
    )
    cells = [_COLUMNS, *(fixed + _figures(row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(_COLUMNS))]
    lefts = ("model", "backend", "test")
    lines = [
        " | ".join(
            cell.ljust(width) if column in lefts else cell.rjust(width)
            for cell, width, column in zip(row, widths, _COLUMNS, strict=True)
        )
        for row in cells
    ]
    rules = ["-" * width + ("-" if column in lefts else ":") for width, column in zip(widths, _COLUMNS, strict=True)]
    head, *body = (f"| {line} |" for line in lines)
    return "\n".join([head, "| " + "| ".join(rules) + "|", *body])


def _figures(row: BenchRow) -> tuple[str, ...]:
    return (
        row.name,
        f"{row.tokens_per_s:.2f} ± {row.tokens_per_s_sd:.2f}",
        f"{row.gbps:.1f}",
        f"{row.share_of_bandwidth:.0%} of {row.read_bandwidth_gbps:.1f}",
    )
