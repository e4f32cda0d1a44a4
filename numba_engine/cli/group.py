"""The group all commands belong to, and what becomes of their errors."""

from __future__ import annotations

import traceback

import click

from numba_engine.cli.console import prepare_streams
from numba_engine.errors import NumbaEngineError

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells report a process ended by SIGINT."""


_WORK_WITHOUT_STDOUT = frozenset({"serve", "fetch-demo"})
"""Commands that are there for something else than what they print."""


class _UserError(click.ClickException):
    exit_code = 2


class _Bug(click.ClickException):
    exit_code = 1


class _Group(click.Group):
    """Turns errors into one line on stderr: exit code 2 for what the user can mend, 1 for anything unforeseen."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        prepare_streams(needs_stdout=name not in _WORK_WITHOUT_STDOUT)
        return name, command, rest

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(INTERRUPTED)
        except Exception as error:
            if ctx.params.get("debug"):
                traceback.print_exc()
            if isinstance(error, NumbaEngineError | OSError):
                raise _UserError(str(error)) from error
            hint = "" if ctx.params.get("debug") else "; numba-engine --debug … shows where"
            first_line = str(error).partition("\n")[0]
            raise _Bug(f"this is a bug: {type(error).__name__}: {first_line}{hint}") from error


@click.group(cls=_Group, context_settings={"auto_envvar_prefix": "NUMBA_ENGINE", "max_content_width": 110})
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.version_option(package_name="numba-engine")
def cli(debug: bool) -> None:
    """Run large language models, and see where each token's time and bytes go.

    MODEL is a Hugging Face directory, a .gguf file, or the word demo.
    """
