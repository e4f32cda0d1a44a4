"""A GGUF file of several formats at once, as llama.cpp's mixtures are, against float64 arithmetic on its values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from numba_engine.config import ActivationDtype, BackendName, EngineConfig
from numba_engine.formats import F32, Q4_K, Q6_K, Q8_0, dequantize
from numba_engine.model.config import ModelConfig
from numba_engine.model.tensors import tensors_of
from tests.golden.forward import Forward
from tests.models.cases import POSITIONS, PROMPT
from tests.reference import decoder as reference
from tests.tiny_models import TinyModel, gguf_name, store, tiny_tensors, write_gguf

MODEL = TinyModel(hidden_size=256, intermediate_size=512, num_heads=4, num_kv_heads=2, head_dim=64, seed=11)
FORMATS = {
    "token_embd": Q6_K,
    "attn_v": Q6_K,
    "ffn_down": Q6_K,
    "ffn_up": Q8_0,  # gate and up are not one segment
    "output.weight": Q6_K,
    "attn_output": F32,
}


def expected_logits(model: ModelConfig, by_hf_name: Mapping[str, np.ndarray]) -> np.ndarray:
    stacks = {t.full_name: np.concatenate([by_hf_name[part.hf_name] for part in t.parts]) for t in tensors_of(model)}
    return reference.forward(model, stacks, PROMPT)[list(POSITIONS)]


@pytest.mark.parametrize("fusion", [True, False])
@pytest.mark.parametrize(
    ("backend", "activation_dtype"), [*(("cpu", dtype) for dtype in get_args(ActivationDtype)), ("ptx", "int8")]
)
def test_logits_are_those_of_the_stored_values(
    tmp_path: Path, backend: BackendName, activation_dtype: ActivationDtype, fusion: bool
) -> None:
    path = write_gguf(tmp_path / "mixed.gguf", MODEL, format=Q4_K, formats=FORMATS)
    config = EngineConfig(
        backend=backend, num_threads=2, activation_dtype=activation_dtype, kv_cache_dtype="float32", fusion=fusion
    )
    forward = Forward.load(path, config, max_tokens=len(PROMPT))
    logits = forward.logits(PROMPT, POSITIONS)

    original = tiny_tensors(MODEL)
    stored = {}
    for name, values in original.items():
        chosen = next((f for key, f in FORMATS.items() if key in gguf_name(name)), Q4_K)
        stored[name] = dequantize(store(name, values, chosen))
    expected = expected_logits(forward.model_config, stored)
    assert expected.std() > 1
    # Activations rounded to 16 bits move logits by 0.001.
    tolerance = 1e-4 if activation_dtype == "float32" else 3e-3
    np.testing.assert_allclose(logits, expected, rtol=0, atol=tolerance)
    assert np.abs(expected_logits(forward.model_config, original) - expected).max() > 0.01  # the rounding shows
