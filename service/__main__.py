"""``numba-engine``: the commands of the engine, and ``serve``."""

from __future__ import annotations

from typing import Any

import click

from numba_engine.cli import cli
from numba_engine.cli.loading import load_ready
from numba_engine.cli.options import engine_config, engine_options, execution_options
from numba_engine.profiling import ProfileSession
from service import server
from service.config import service_config, service_options


@click.command()
@click.argument("model")
@service_options
@engine_options
@execution_options
@click.pass_context
def serve(ctx: click.Context, /, model: str, **options: Any) -> None:
    """Serve a model over gRPC.

    The address answers at once; health says NOT_SERVING until the model is loaded. SIGTERM or Ctrl-C lets running
    requests finish, a second one ends at once. Each option reads NUMBA_ENGINE_SERVE_<OPTION> where it is not given.
    """
    config = engine_config(options)
    ctx.exit(server.run(service_config(options), lambda progress: ProfileSession(load_ready(model, config, progress))))


cli.add_command(serve)


def main() -> None:
    """The console script ``numba-engine``."""
    cli(prog_name="numba-engine")


if __name__ == "__main__":
    main()
