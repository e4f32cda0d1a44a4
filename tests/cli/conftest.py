"""Commands run in this process, on a model that is not there."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import pytest
from click.testing import CliRunner, Result

from numba_engine.cli import cli, loading
from numba_engine.sampling_params import SamplingParams
from tests.cli.fake_llm import FakeLLM, FakeSession


@pytest.fixture
def llms(monkeypatch: pytest.MonkeyPatch) -> list[FakeLLM]:
    """The models that commands loaded."""
    made: list[FakeLLM] = []
    monkeypatch.setattr(loading, "LLM", FakeLLM)
    for command in ("bench", "profile"):
        monkeypatch.setattr(import_module(f"numba_engine.cli.{command}"), "ProfileSession", FakeSession)
    monkeypatch.setattr(FakeLLM, "made", made, raising=False)
    monkeypatch.setattr(FakeLLM, "on_step", lambda index: None, raising=False)
    monkeypatch.setattr(FakeLLM, "default_sampling", SamplingParams(temperature=0.6, top_p=0.95), raising=False)
    return made


@pytest.fixture
def run(llms: list[FakeLLM]) -> Callable[..., Result]:
    """``run("generate", "m", …)``; keywords are the runner's: input, env."""
    runner = CliRunner()
    return lambda *arguments, **more: runner.invoke(cli, arguments, **more)
