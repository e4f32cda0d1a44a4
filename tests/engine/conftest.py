"""A tiny model for the engine's tests, and engines over it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from numba_engine import LLM, EngineConfig
from tests.tiny_models import TinyModel, write_hf

MakeLLM = Callable[..., LLM]


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(tmp_path_factory.mktemp("tiny") / "llama", TinyModel(max_position=256))


@pytest.fixture(scope="session", params=[True, False], ids=["graph", "no-graph"])
def graph(request: pytest.FixtureRequest) -> bool:
    """Whether engines replay their decode steps."""
    return bool(request.param)


@pytest.fixture(scope="session")
def engines(tiny_path: Path) -> MakeLLM:
    """Builds an engine with the given settings over the tiny model; equal settings share one."""
    built: dict[tuple[tuple[str, Any], ...], LLM] = {}

    def make(**settings: Any) -> LLM:
        key = tuple(sorted(settings.items()))
        if key not in built:
            config = EngineConfig(**{"backend": "cpu", "num_threads": 2, "num_kv_blocks": 128, **settings})
            built[key] = LLM(str(tiny_path), config)
        llm = built[key]
        assert not llm.has_unfinished, "an earlier test left a request behind"
        return llm

    return make


@pytest.fixture(scope="module")
def make_llm(engines: MakeLLM, graph: bool) -> MakeLLM:
    """An engine with the given settings. Of a file's scope: it may say what ``graph`` is."""
    return lambda **settings: engines(**{"graph": graph, **settings})


@pytest.fixture
def llm(make_llm: MakeLLM) -> LLM:
    return make_llm()
