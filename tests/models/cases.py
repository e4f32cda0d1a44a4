"""The tiny models whose logits are compared with transformers, and the prompt they see."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.tiny_models import LLAMA3_ROPE, TinyModel

CASES: dict[str, TinyModel] = {
    "llama_gqa1_dim64": TinyModel(hidden_size=96, num_heads=3, num_kv_heads=3, head_dim=64, seed=1),
    "llama_gqa3_dim64_tied": TinyModel(
        hidden_size=96, num_heads=6, num_kv_heads=2, head_dim=64, tie_word_embeddings=True, seed=2
    ),
    "llama_gqa4_dim128_llama3_rope": TinyModel(
        num_heads=4, num_kv_heads=1, head_dim=128, rope_scaling=LLAMA3_ROPE, rope_theta=500000.0, seed=3
    ),
    "llama_gqa8_dim80": TinyModel(num_heads=8, num_kv_heads=1, head_dim=80, intermediate_size=160, seed=4),
    "mistral_window8": TinyModel(architecture="mistral", sliding_window=8, head_dim=64, num_layers=3, seed=5),
    "mistral_no_window": TinyModel(architecture="mistral", head_dim=32, rope_theta=1e6, seed=6),
    "qwen2_bias_tied": TinyModel(
        architecture="qwen2", num_heads=8, num_kv_heads=2, tie_word_embeddings=True, rms_norm_eps=1e-6, seed=7
    ),
    "qwen2_window5": TinyModel(architecture="qwen2", sliding_window=5, head_dim=32, seed=8),
    "qwen3_qk_norm_dim128": TinyModel(
        architecture="qwen3", num_heads=3, num_kv_heads=1, head_dim=128, rope_theta=1e6, rms_norm_eps=1e-6, seed=9
    ),
}

PROMPT = np.random.default_rng(0).integers(0, 300, 37).tolist()
"""Longer than every window and than two KV blocks of 16."""

POSITIONS = (0, 7, 16, 35, 36)
"""Where logits are compared: the first token, around a window's edge and a block's border, the last two."""

GOLDEN_FILE = Path(__file__).parent / "logits.npz"
