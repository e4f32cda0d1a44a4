"""``numba-engine``: the commands of the engine, and ``serve``."""

from __future__ import annotations

from typing import Any

import click

from numba_engine import LLM, EngineConfig, Progress, SamplingParams
from numba_engine.cli import cli
from numba_engine.cli.options import engine_config, engine_options
from service import server
from service.config import service_config, service_options


@click.command()
@click.argument("model")
@service_options
@engine_options
@click.pass_context
def serve(ctx: click.Context, /, model: str, **options: Any) -> None:
    """Serve a model over gRPC.

    The address answers at once; health says NOT_SERVING until the model is loaded. SIGTERM or Ctrl-C lets running
    requests finish, a second one ends at once. Each option reads NUMBA_ENGINE_SERVE_<OPTION> where it is not given.
    """
    config = engine_config(options)
    ctx.exit(server.run(service_config(options), lambda progress: _load(model, config, progress)))


def _load(model: str, config: EngineConfig, progress: Progress) -> LLM:
    """The loaded model, its kernels compiled: ready means that the first request is answered as fast as the next."""
    llm = LLM(model, config, progress=progress)
    # On the simulated GPU nothing is fast, and each token here would take a good while.
    if llm.model_info.backend != "ptx":
        progress("compiling kernels", 0, 0)
        greedy = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        sampled = SamplingParams(top_k=5, top_p=0.9, min_p=0.1, logprobs=1, max_tokens=2, ignore_eos=True)
        llm.generate([[0] * 20, [0] * 3], [greedy, sampled])
    return llm


cli.add_command(serve)


def main() -> None:
    """The console script ``numba-engine``."""
    cli(prog_name="numba-engine")


if __name__ == "__main__":
    main()
