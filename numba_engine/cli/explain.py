"""``numba-engine explain``: one real token's way through the model, with what was measured on it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

import click

from numba_engine.cli.console import print_json, wide_console
from numba_engine.cli.loading import load
from numba_engine.cli.options import drawing_options, engine_config, engine_options, sampling_params
from numba_engine.cli.prompt import prompt_options, read_prompt
from numba_engine.engine.llm import LLM
from numba_engine.errors import FieldViolation, InvalidRequestError
from numba_engine.profiling.explain.answers import answers
from numba_engine.profiling.explain.caches import cpu_caches
from numba_engine.profiling.explain.close_up import CloseUp, CloseUpStep
from numba_engine.profiling.explain.essay import essay
from numba_engine.profiling.explain.stages import choose
from numba_engine.profiling.explain.walk import (
    Token,
    Walk,
    as_json,
    budget_of,
    cost_of,
    embedding_row,
    fastest,
    near_of,
    phases_of,
)
from numba_engine.profiling.session import ProfileSession
from numba_engine.sampling_params import SamplingParams

_DEFAULT_PROMPT = "The capital of France is"
_DEFAULT_REPETITIONS = 8
_WIDE_TOKENS = 128
_UNWATCHED_TOKENS = 32
_DISAGREED = 1


@click.command()
@click.argument("model")
@prompt_options
@drawing_options
@click.option("--seed", type=int, default=0, show_default=True, metavar="S", help="The same seed draws the same token.")
@click.option("--fusion/--no-fusion", default=True, help="Fused phases, or the textbook ops one by one.")
@click.option(
    "-r",
    "--repetitions",
    type=click.IntRange(1),
    metavar="R",
    help=f"Times are those of the fastest of so many runs.  [default: {_DEFAULT_REPETITIONS}, on ptx 1]",
)
@engine_options
@click.option("--json", "as_json_object", is_flag=True, help="Print one JSON object: walk, answers.")
@click.option("-q", "--quiet", is_flag=True, help="No progress on stderr.")
@click.pass_context
def explain(
    ctx: click.Context,
    /,
    model: str,
    prompt: str | None,
    prompt_file: str | None,
    chat: str | None,
    system: str | None,
    fusion: bool,
    repetitions: int | None,
    as_json_object: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Follow one token from prompt to text, with this model's shapes and this machine's measured numbers.

    The prompt is prefilled, a first token drawn, and the step that decodes the second one is explained: its embedding
    row, its layers, its logits, what each stage of sampling leaves of them, the draw, and what all of it took against
    the time that memory allows. Sampling options that are not given are the model's own defaults. Every repetition
    prefills anew, so prefix caching is off. Exit code 1 if the draw computed here is not the engine's.
    """
    text = read_prompt(prompt, prompt_file, chat, system, default=_DEFAULT_PROMPT)
    sampling_params(options)  # complains before a long load, not after
    llm = load(model, engine_config(options, prefix_caching=False), quiet=quiet)
    if repetitions is None:
        repetitions = 1 if llm.model_info.backend == "ptx" else _DEFAULT_REPETITIONS
    params = sampling_params(options, llm.default_sampling)
    token_ids = text.token_ids(llm)
    whole = llm.detokenize(token_ids) if text.is_chat else text.text
    walk = _walk(llm, whole, token_ids, params, fusion=fusion, repetitions=repetitions)
    if as_json_object:
        said = {"walk": as_json(walk), "answers": as_json(answers(walk))}
        print_json(said)
    else:
        wide_console().print(essay(walk))
    if not walk.choice.agrees:
        ctx.exit(_DISAGREED)


def _walk(
    llm: LLM, prompt: str, token_ids: list[int], params: SamplingParams, *, fusion: bool, repetitions: int
) -> Walk:
    """Run everything the explanation needs, each ``repetitions`` times, and put it together."""
    info = llm.model_info
    if len(token_ids) > info.max_model_len - 2:
        room = f"is {len(token_ids)} tokens; with the two that follow they must fit into {info.max_model_len}"
        raise InvalidRequestError(FieldViolation("prompt", room))
    unwatched_time_s = _unwatched_time_s(llm, token_ids, params)

    session = ProfileSession(llm)
    session.start(fusion=fusion, recorder=CloseUp)
    try:
        runs = [_run(session, token_ids, params, num_tokens=2) for _ in range(repetitions)]
        drawn, text = runs[0].token_ids, runs[0].text
        assert all(run.token_ids == drawn for run in runs), "the same seed gives the same tokens"
        context = [*token_ids, drawn[0]]
        recompute = [_run(session, context, params, num_tokens=1) for _ in range(repetitions)]
        wide_ids = _wide_prompt(llm, context)
        wide = [_run(session, wide_ids, params, num_tokens=1) for _ in range(repetitions)]
    finally:
        summary = session.stop()

    *prefill_steps, decode_step = _fastest_steps(runs)
    costs = {
        "prefill": cost_of(prefill_steps, len(token_ids)),
        "decode": cost_of([decode_step], len(context)),
        "recompute": cost_of(_fastest_steps(recompute), len(context)),
        "wide": cost_of(_fastest_steps(wide), len(wide_ids)),
    }
    phases = phases_of(decode_step, info.num_layers)
    logits = runs[0].steps[-1].logits
    assert logits is not None
    return Walk(
        model=info,
        caches=cpu_caches() if info.backend == "cpu" else (),
        repetitions=repetitions,
        prompt=prompt,
        prompt_tokens=tuple(_token(llm, token_id) for token_id in token_ids),
        first_token=_token(llm, drawn[0]),
        prefill=costs["prefill"],
        decode=costs["decode"],
        embedding=embedding_row(_token(llm, drawn[0]), phases.embedding),
        layer_phases=phases.layer,
        layers=phases.layers,
        head_phases=phases.head,
        sample=phases.sample,
        choice=choose(
            logits[0],
            params,
            prompt_token_ids=token_ids,
            output_token_ids=drawn[:1],
            engine_token_id=drawn[1],
            piece=lambda token_id: _token(llm, token_id).text,
        ),
        token=_token(llm, drawn[1]),
        text=text,
        budget=budget_of(
            costs["decode"],
            list(costs.values()),
            read_bandwidth_gbps=summary.read_bandwidth_gbps,
            unwatched_time_s=unwatched_time_s,
        ),
        recompute=costs["recompute"],
        wide=costs["wide"],
        near=near_of(decode_step),
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """One request under the profile that is on."""

    steps: tuple[CloseUpStep, ...]
    token_ids: tuple[int, ...]
    text: str


def _run(session: ProfileSession, token_ids: list[int], params: SamplingParams, *, num_tokens: int) -> _Run:
    profiles, drawn, text = [], [], ""
    with session.running([session.llm.validate(token_ids, _going_on(params, num_tokens))]) as steps:
        for step in steps:
            assert isinstance(step.profile, CloseUpStep)
            profiles.append(step.profile)
            drawn += [token_id for output in step.outputs for token_id in output.token_ids]
            text += "".join(output.text for output in step.outputs)
    return _Run(tuple(profiles), tuple(drawn), text)


def _fastest_steps(runs: Sequence[_Run]) -> list[CloseUpStep]:
    return [fastest(same) for same in zip(*(run.steps for run in runs), strict=True)]


def _unwatched_time_s(llm: LLM, token_ids: list[int], params: SamplingParams) -> float:
    """A token's time with no profile on: the fastest step of a row of them."""
    num_tokens = 2 if llm.model_info.backend == "ptx" else _UNWATCHED_TOKENS
    times = []
    before_s: float | None = None
    for _ in llm.stream(token_ids, _going_on(params, num_tokens)):
        now_s = time.perf_counter()
        if before_s is not None:
            times.append(now_s - before_s)
        before_s = now_s
    return min(times)


def _going_on(params: SamplingParams, num_tokens: int) -> SamplingParams:
    return replace(params, max_tokens=num_tokens, ignore_eos=True)


def _wide_prompt(llm: LLM, context: list[int]) -> list[int]:
    """The context over and over, as long as _WIDE_TOKENS or the context length allows; never shorter than it is."""
    if llm.model_info.backend == "ptx":
        return context  # a simulated GPU would take minutes for more
    length = max(min(_WIDE_TOKENS, llm.model_info.max_model_len - 1), len(context))
    return list(islice(cycle(context), length))


def _token(llm: LLM, token_id: int) -> Token:
    return Token(token_id, llm.detokenize([token_id]))
