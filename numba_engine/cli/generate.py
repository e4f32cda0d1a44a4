"""``numba-engine generate``: a prompt in, its continuation on stdout as it comes."""

from __future__ import annotations

import dataclasses
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import click

from numba_engine.cli.console import print_json, write_text
from numba_engine.cli.group import INTERRUPTED
from numba_engine.cli.loading import load
from numba_engine.cli.options import (
    engine_config,
    engine_options,
    execution_options,
    sampling_options,
    sampling_params,
)
from numba_engine.cli.prompt import prompt_options, read_prompt
from numba_engine.engine.llm import LLM
from numba_engine.outputs import FinishReason, PositionLogprobs, RequestOutput, TokenLogprob, Usage
from numba_engine.sampling_params import SamplingParams

_REQUEST_ID = "generate"


@click.command()
@click.argument("model")
@prompt_options
@sampling_options
@engine_options
@execution_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end instead of streaming text.")
@click.option("-q", "--quiet", is_flag=True, help="No progress and no summary on stderr.")
@click.pass_context
def generate(
    ctx: click.Context,
    /,
    model: str,
    prompt: str | None,
    prompt_file: str | None,
    chat: str | None,
    system: str | None,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Continue a prompt, or answer a chat message.

    The text streams to stdout and nothing else does; Ctrl-C ends it after the current token. Sampling options
    that are not given are the model's own defaults.
    """
    text = read_prompt(prompt, prompt_file, chat, system)
    sampling_params(options)  # complains before a long load, not after
    if options["logprobs"] is not None and not as_json:
        raise click.UsageError("--logprobs goes with --json")

    llm = load(model, engine_config(options), quiet=quiet)
    prompt_token_ids = text.token_ids(llm)
    outputs = []
    for output in _run(llm, prompt_token_ids, sampling_params(options, llm.default_sampling)):
        outputs.append(output)
        output.raise_error()
        if not as_json:
            write_text(output.text)

    if as_json:
        print_json(_to_json(prompt_token_ids, outputs))
    elif sys.stdout.isatty():
        click.echo()
    if not quiet:
        click.echo(_summary(outputs[-1]), err=True)
    if outputs[-1].finish_reason is FinishReason.ABORTED:
        ctx.exit(INTERRUPTED)


def _run(llm: LLM, prompt_token_ids: list[int], params: SamplingParams) -> Iterator[RequestOutput]:
    """The request's outputs. After Ctrl-C the last one says ABORTED and still has its usage and timings."""
    llm.add_request(_REQUEST_ID, prompt_token_ids, params)
    with _first_interrupt_noted() as interrupted:
        while llm.has_unfinished:
            yield from llm.step()
            if interrupted and (aborted := llm.abort(_REQUEST_ID)):
                yield aborted


@contextmanager
def _first_interrupt_noted() -> Iterator[list[int]]:
    """Collects the first SIGINT, so that a step is never torn; a second one interrupts at once."""
    seen: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(signum)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)


def _to_json(prompt_token_ids: list[int], outputs: list[RequestOutput]) -> dict[str, Any]:
    last = outputs[-1]
    assert last.finish_reason is not None
    assert last.timings is not None
    logprobs = [position for output in outputs for position in output.logprobs]
    return {
        "prompt_token_ids": list(prompt_token_ids),
        "token_ids": [token_id for output in outputs for token_id in output.token_ids],
        "text": "".join(output.text for output in outputs),
        "finish_reason": last.finish_reason.value,
        "stop_sequence": last.stop_sequence,
        "stop_token_id": last.stop_token_id,
        "logprobs": [_position_to_json(position) for position in logprobs] or None,
        "usage": dataclasses.asdict(last.usage),
        "timings": dataclasses.asdict(last.timings),
    }


def _position_to_json(position: PositionLogprobs) -> dict[str, Any]:
    def token(entry: TokenLogprob) -> dict[str, Any]:
        return {"token_id": entry.token_id, "logprob": float(entry.logprob), "text": entry.text}

    return {**token(position.chosen), "top": [token(entry) for entry in position.top]}


def _summary(last: RequestOutput) -> str:
    """One line: what was read and written, and how fast."""
    assert last.finish_reason is not None
    assert last.timings is not None
    usage, timings = last.usage, last.timings
    cached = f" ({usage.cached_prompt_tokens} cached)" if usage.cached_prompt_tokens else ""
    return (
        f"prompt: {usage.prompt_tokens} tokens{cached}, first token after {timings.ttft_s:.3f} s; "
        f"output: {usage.completion_tokens} tokens{_decode_rate(usage, timings.decode_s)}; "
        f"finished by {last.finish_reason.value}"
    )


def _decode_rate(usage: Usage, decode_s: float) -> str:
    """The first token belongs to the prompt's time, so n tokens make n - 1 intervals."""
    return f", {(usage.completion_tokens - 1) / decode_s:.1f} tok/s" if decode_s > 0 else ""
