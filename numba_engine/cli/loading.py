"""Loading a model with its progress on the terminal."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from numba_engine.checkpoint import Progress as ReportProgress
from numba_engine.config import EngineConfig
from numba_engine.engine.llm import LLM


def load(model: str, config: EngineConfig, *, quiet: bool = False) -> LLM:
    """The loaded model, ready to run; a progress bar on stderr where that is a terminal."""
    with ProgressBar(quiet=quiet) as progress:
        return load_ready(model, config, progress)


def load_ready(model: str, config: EngineConfig, progress: ReportProgress) -> LLM:
    """The loaded model, its kernels compiled: the first request is answered as fast as the next."""
    llm = LLM(model, config, progress=progress)
    # On the simulated GPU nothing is fast, and each token of a warm-up would take a good while.
    if llm.model_info.backend != "ptx":
        progress("compiling kernels", 0, 0)
        llm.warm_up()
    return llm


class ProgressBar:
    """A bar on stderr for what is read or downloaded now; silent where stderr is no terminal.

    Called as the engine calls it: with what it is (a tensor, a download), bytes done, and bytes in all (0: unknown).
    """

    def __init__(self, *, quiet: bool = False) -> None:
        console = Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description:<36}"),
            BarColumn(),
            DownloadColumn(binary_units=False),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=quiet or not console.is_terminal,
        )
        self._bar = self._bars.add_task("opening", total=None)

    def __enter__(self) -> ProgressBar:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def __call__(self, what: str, done_bytes: int, total_bytes: int) -> None:
        self._bars.update(self._bar, description=what, completed=done_bytes, total=total_bytes or None)
