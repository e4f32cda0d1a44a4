"""A GGUF file of several formats at once, as llama.cpp's mixtures are, against float64 arithmetic on its values."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from numba_engine.config import ActivationDtype, EngineConfig
from numba_engine.formats import F32, Q4_K, Q6_K, Q8_0, dequantize
from tests.golden.forward import Forward
from tests.models.cases import POSITIONS, PROMPT
from tests.reference import ops as reference
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


def logits_in_float64(model: TinyModel, weights: dict[str, np.ndarray]) -> np.ndarray:
    """[POSITIONS, vocab] after PROMPT: llama, unfused, weights by Hugging Face name."""
    heads, kv_heads, d, t = model.num_heads, model.num_kv_heads, model.head_dim, len(PROMPT)
    angles = np.arange(t)[:, None] / model.rope_theta ** (np.arange(0, d, 2) / d)
    residual = reference.embedding(np.array(PROMPT), weights["model.embed_tokens.weight"]).astype(np.float64)
    for i in range(model.num_layers):
        layer = f"model.layers.{i}."
        normed = reference.rms_norm(residual, weights[layer + "input_layernorm.weight"], model.rms_norm_eps)
        q, k, v = (reference.linear(normed, weights[f"{layer}self_attn.{which}_proj.weight"]) for which in "qkv")
        qk = reference.rope(
            np.concatenate([q, k], axis=1), np.arange(t), np.cos(angles), np.sin(angles), heads + kv_heads
        )
        q = qk[:, : heads * d].reshape(t, heads, d)
        k, v = (np.repeat(y.reshape(t, kv_heads, d), heads // kv_heads, axis=1) for y in (qk[:, heads * d :], v))
        scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(d) + np.triu(np.full((t, t), -np.inf), 1)
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        attended = np.einsum("hts,shd->thd", shares / shares.sum(axis=-1, keepdims=True), v).reshape(t, -1)
        residual += reference.linear(attended, weights[layer + "self_attn.o_proj.weight"])
        normed = reference.rms_norm(residual, weights[layer + "post_attention_layernorm.weight"], model.rms_norm_eps)
        gate, up = (reference.linear(normed, weights[f"{layer}mlp.{which}_proj.weight"]) for which in ("gate", "up"))
        activated = reference.gated_activation(np.concatenate([gate, up], axis=1))
        residual += reference.linear(activated, weights[layer + "mlp.down_proj.weight"])
    normed = reference.rms_norm(residual[list(POSITIONS)], weights["model.norm.weight"], model.rms_norm_eps)
    return reference.linear(normed, weights["lm_head.weight"])


@pytest.mark.parametrize("fusion", [True, False])
@pytest.mark.parametrize("activation_dtype", get_args(ActivationDtype))
def test_logits_are_those_of_the_stored_values(tmp_path: Path, activation_dtype: ActivationDtype, fusion: bool) -> None:
    path = write_gguf(tmp_path / "mixed.gguf", MODEL, format=Q4_K, formats=FORMATS)
    config = EngineConfig(
        backend="cpu", num_threads=2, activation_dtype=activation_dtype, kv_cache_dtype="float32", fusion=fusion
    )
    forward = Forward(path, config, max_tokens=len(PROMPT))
    logits = forward.logits(PROMPT, POSITIONS)

    tensors = tiny_tensors(MODEL)
    weights = {}
    for name, values in tensors.items():
        chosen = next((f for key, f in FORMATS.items() if key in gguf_name(name)), Q4_K)
        weights[name] = dequantize(store(name, values, chosen))
    expected = logits_in_float64(MODEL, weights)
    assert expected.std() > 1
    # Activations rounded to 16 bits move logits by 0.001.
    tolerance = 1e-4 if activation_dtype == "float32" else 3e-3
    np.testing.assert_allclose(logits, expected, rtol=0, atol=tolerance)
    assert np.abs(logits_in_float64(MODEL, tensors) - expected).max() > 0.01  # the rounding shows
