"""Options that commands share, and the values they become.

Every option of :func:`engine_options` is named as the field of ``EngineConfig`` it sets (``sampling_options``:
``SamplingParams``), so a command takes ``**options`` and hands them to :func:`engine_config`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_args

import click

from numba_engine.config import ActivationDtype, BackendName, EngineConfig, KVCacheDtype
from numba_engine.sampling_params import SamplingParams

Command = TypeVar("Command", bound=Callable[..., Any])


def _byte_size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """``1500000``, ``512MiB``, ``2G``: K, M, G and T are powers of 1024."""
    if value is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", value.strip(), re.IGNORECASE)
    if match is None:
        raise click.BadParameter(f"{value!r} is not a number of bytes such as 1500000, 512MiB or 2G", ctx, param)
    number, unit = match.groups()
    return int(float(number) * 1024 ** " KMGT".index(unit.upper() or " "))


def _logit_bias(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> dict[int, float]:
    """``ID:BIAS`` each."""
    biases = {}
    for entry in value:
        token_id, _, bias = entry.partition(":")
        try:
            biases[int(token_id)] = float(bias)
        except ValueError:
            raise click.BadParameter(f"{entry!r} is no token id and number such as 42:-1.5", ctx, param) from None
    return biases


_ENGINE_OPTIONS = (
    click.option("--backend", type=click.Choice(get_args(BackendName)), help="Where to compute.  [default: auto]"),
    click.option("--threads", "num_threads", type=int, metavar="N", help="CPU threads.  [default: all usable cores]"),
    click.option(
        "--activation-dtype",
        type=click.Choice(get_args(ActivationDtype)),
        help="What quantised weights are multiplied with.  [default: int8]",
    ),
    click.option(
        "--kv-cache-dtype",
        type=click.Choice(get_args(KVCacheDtype)),
        help="Element type of the KV cache.  [default: auto, by the activation dtype]",
    ),
    click.option("--kv-cache-bytes", callback=_byte_size, metavar="SIZE", help="Memory for the KV cache: 2GiB, …"),
    click.option("--num-kv-blocks", type=int, metavar="N", help="KV blocks in all, instead of --kv-cache-bytes."),
    click.option("--block-size", type=int, metavar="N", help="Tokens per KV block: 8, 16, 32, 64 or 128."),
    click.option("--max-model-len", type=int, metavar="N", help="Longest context in tokens.  [default: the model's]"),
    click.option("--max-num-seqs", type=int, metavar="N", help="Sequences in one step at most."),
    click.option("--max-num-batched-tokens", type=int, metavar="N", help="Tokens in one step at most."),
    click.option("--max-waiting", type=int, metavar="N", help="Requests that may wait for admission."),
    click.option("--prefix-caching/--no-prefix-caching", default=None, help="Reuse the KV blocks of equal beginnings."),
)

_EXECUTION_OPTIONS = (
    click.option("--fusion/--no-fusion", default=None, help="Fused phases, or the textbook ops one by one."),
    click.option("--graph/--no-graph", default=None, help="Replay decode steps as captured, or launch op by op."),
)

_DRAWING_OPTIONS = (
    click.option("--temperature", type=float, metavar="T", help="0 is greedy."),
    click.option("--top-k", type=int, metavar="K", help="Keep the K most likely tokens; 0 keeps all."),
    click.option("--top-p", type=float, metavar="P", help="Keep the most likely tokens that make up this probability."),
    click.option("--min-p", type=float, metavar="P", help="Drop tokens below this share of the likeliest one's."),
    click.option("--repetition-penalty", type=float, metavar="R", help="Above 1 makes seen tokens less likely."),
    click.option("--presence-penalty", type=float, metavar="A", help="Subtracted for tokens already in the output."),
    click.option("--frequency-penalty", type=float, metavar="A", help="The same, times how often they occur."),
)

_SAMPLING_OPTIONS = (
    click.option("-n", "--max-tokens", type=int, metavar="N", help="Tokens to generate at most."),
    *_DRAWING_OPTIONS,
    click.option(
        "--logit-bias",
        callback=_logit_bias,
        multiple=True,
        metavar="ID:BIAS",
        help="Added to a token's logit; may be repeated.",
    ),
    click.option("--seed", type=int, metavar="S", help="The same seed gives the same tokens."),
    click.option("--stop", multiple=True, metavar="TEXT", help="Stop at this text, taken literally; may be repeated."),
    click.option(
        "--stop-token-id", "stop_token_ids", type=int, multiple=True, metavar="ID", help="Stop at this token too."
    ),
    click.option("--ignore-eos", is_flag=True, default=None, help="Go on past the model's end tokens."),
    click.option("--logprobs", type=int, metavar="N", help="With --json: log-probabilities of the N likeliest tokens."),
    click.option("--time-limit", "time_limit_s", type=float, metavar="SECONDS", help="End after this long."),
)


def engine_options(command: Command) -> Command:
    """Add the options of ``EngineConfig``. Each reads ``NUMBA_ENGINE_<COMMAND>_<OPTION>`` where it is not given."""
    return add_options(command, _ENGINE_OPTIONS)


def execution_options(command: Command) -> Command:
    """Add those options of ``EngineConfig`` that change how a step runs and none of its tokens."""
    return add_options(command, _EXECUTION_OPTIONS)


def drawing_options(command: Command) -> Command:
    """Add those options of ``SamplingParams`` that shape the distribution."""
    return add_options(command, _DRAWING_OPTIONS)


def sampling_options(command: Command) -> Command:
    """Add the options of ``SamplingParams``."""
    return add_options(command, _SAMPLING_OPTIONS)


def engine_config(options: Mapping[str, Any], **fixed: Any) -> EngineConfig:
    """The config that the given options describe; ``fixed`` fields are the command's own. Raises ConfigError."""
    return EngineConfig(**{**_given(options, EngineConfig), **fixed})


def sampling_params(options: Mapping[str, Any], default: SamplingParams | None = None) -> SamplingParams:
    """The parameters that the given options describe, the rest as in ``default``. Raises InvalidRequestError."""
    return dataclasses.replace(default or SamplingParams(), **_given(options, SamplingParams))


def add_options(command: Command, options: tuple[Callable[[Command], Command], ...]) -> Command:
    """Decorate with all of them; help lists them in this order."""
    for option in reversed(options):
        command = option(command)
    return command


def _given(options: Mapping[str, Any], fields_of: type) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(fields_of)}
    return {name: value for name, value in options.items() if name in names and value not in (None, (), {})}
