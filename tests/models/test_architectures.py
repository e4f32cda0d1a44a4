"""Tiny models of every architecture against transformers, and GGUF against Hugging Face files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from numba_engine.config import EngineConfig
from numba_engine.formats import BF16, FORMATS, Format
from tests.golden.forward import Forward
from tests.models.cases import CASES, GOLDEN_FILE, POSITIONS, PROMPT
from tests.tiny_models import write_gguf, write_hf

EXACT = EngineConfig(backend="cpu", num_threads=2, activation_dtype="float32")


def logits(model: Path) -> np.ndarray:
    return Forward.load(model, EXACT, max_tokens=len(PROMPT)).logits(PROMPT, POSITIONS)


@pytest.mark.parametrize("name", CASES)
def test_logits_agree_with_transformers(name: str, tmp_path: Path) -> None:
    with np.load(GOLDEN_FILE) as golden:
        expected = golden[name]
    assert expected.std() > 1
    np.testing.assert_allclose(logits(write_hf(tmp_path / "hf", CASES[name])), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_gguf_says_the_same_as_hugging_face(name: str, tmp_path: Path) -> None:
    from_gguf = logits(write_gguf(tmp_path / "model.gguf", CASES[name]))
    with np.load(GOLDEN_FILE) as golden:
        np.testing.assert_allclose(from_gguf, golden[name], rtol=0, atol=1e-4)


@pytest.mark.parametrize("format", [BF16, *(format for format in FORMATS.values() if format.is_quantized)], ids=repr)
def test_quantised_weights_say_what_their_values_say(format: Format, tmp_path: Path) -> None:
    """The same rounded values, once packed in a GGUF file and once as float32."""
    model = CASES["llama_gqa1_dim64"]
    if format.block_size > 32:  # rows of whole blocks
        model = replace(model, hidden_size=256, intermediate_size=512, num_heads=4, num_kv_heads=4)
    packed = logits(write_gguf(tmp_path / "model.gguf", model, format=format))
    plain = logits(write_hf(tmp_path / "hf", model, rounded_to=format))
    np.testing.assert_allclose(packed, plain, rtol=0, atol=1e-4)
    exact = logits(write_hf(tmp_path / "unrounded", model))
    assert np.abs(packed - exact).max() > 1e-3  # the rounding shows, so both did round
