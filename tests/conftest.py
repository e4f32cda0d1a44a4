"""Fixtures of the whole suite: the demo model, and the rule for tests that need a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import hypothesis
import pytest
from numba.core import event as numba_events

from tests.choice import chosen

_KERNEL_TESTS = Path(__file__).parent / "kernels"

_RUN_KERNELS = {Path(__file__).parent / folder for folder in ("engine", "golden", "kernels", "models", "ptx")}
"""Whatever is in these folders is marked ``kernels``; elsewhere a file or a test says it itself."""

# How long one example takes says more about the machine (two cores, a first compilation) than about the code.
hypothesis.settings.register_profile("suite", deadline=None, print_blob=True)
hypothesis.settings.load_profile("suite")


@pytest.fixture(scope="session")
def demo_path() -> Path:
    """The demo model's GGUF file, downloaded once into the user's cache.

    Where it cannot be had, tests that want it are skipped with the reason; under CI they fail.
    """
    from numba_engine.checkpoint.demo import fetch_demo
    from numba_engine.errors import NumbaEngineError

    try:
        return Path(fetch_demo())
    except (NumbaEngineError, OSError) as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"the demo model cannot be fetched: {error}")


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random llama in Q8_0, with a tokenizer and a chat template."""
    from numba_engine.formats import Q8_0
    from tests.tiny_models import TinyModel, write_gguf

    return write_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf", TinyModel(), format=Q8_0)


def pytest_configure(config: pytest.Config) -> None:
    _CompileGuard.install()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-cases", action="store_true", help="all cases of the kernel tests, not the fixed choice")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Folders of which nothing is left are not even imported."""
    return True if config.option.markexpr == "not kernels" and collection_path in _RUN_KERNELS else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if not _RUN_KERNELS.isdisjoint(item.path.parents):
            item.add_marker(pytest.mark.kernels)
    _skip_without_gpu(items)
    if not config.getoption("--all-cases") and not any("::" in argument for argument in config.args):
        _keep_chosen(config, items)


def _keep_chosen(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cases of kernel tests that ``tests/choice.py`` does not choose."""
    by_file: dict[Path, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("cuda") is None and _KERNEL_TESTS in item.path.parents:
            by_file.setdefault(item.path, []).append(item)
    left_out = {item for cases in by_file.values() for item in set(cases) - chosen(cases)}
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=sorted(left_out, key=lambda item: item.nodeid))


class _CompileGuard(numba_events.Listener):
    """Fails a test that has numba compile or load a kernel and is not marked ``kernels``."""

    running: pytest.Item | None = None

    @classmethod
    def install(cls) -> None:
        numba_events.register("numba:compiler_lock", cls())

    def on_start(self, event: numba_events.Event) -> None:
        running = _CompileGuard.running
        if running is not None and running.get_closest_marker("kernels") is None:
            raise AssertionError(f"{running.nodeid} runs compiled kernels: mark it with pytest.mark.kernels")

    def on_end(self, event: numba_events.Event) -> None:
        pass


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _CompileGuard.running = item
    try:
        return (yield)
    finally:
        _CompileGuard.running = None


def _skip_without_gpu(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("cuda")]
    reason = _why_no_gpu() if on_gpu else None
    for item in on_gpu:
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@cache
def _why_no_gpu() -> str | None:
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return "no NVIDIA driver: nvidia-smi was not found"
    listed = subprocess.run([smi, "-L"], capture_output=True, text=True, timeout=60)
    if listed.returncode or "GPU" not in listed.stdout:
        return f"no NVIDIA GPU: nvidia-smi -L says {(listed.stdout + listed.stderr).strip()!r}"
    return None
