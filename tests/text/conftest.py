"""The demo's vocabulary and the golden answers, read once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from numba_engine.checkpoint import open_checkpoint
from numba_engine.text.tokenizer import Tokenizer, load_tokenizer
from tests.text.vocabularies import gguf_checkpoint


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    value: dict[str, Any] = json.loads(Path(__file__).with_name("golden.json").read_text())
    return value


@pytest.fixture(scope="session")
def demo_metadata(demo_path: Path) -> dict[str, Any]:
    with open_checkpoint(str(demo_path)) as checkpoint:
        return {key: value for key, value in checkpoint.config.items() if key.startswith("tokenizer.")}


@pytest.fixture(scope="session")
def demo(demo_metadata: dict[str, Any]) -> Tokenizer:
    return load_tokenizer(gguf_checkpoint(demo_metadata))


@pytest.fixture(scope="session")
def sentencepiece(golden: dict[str, Any]) -> Tokenizer:
    return load_tokenizer(gguf_checkpoint(golden["sentencepiece"]["metadata"]))
