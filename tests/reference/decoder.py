"""A whole forward pass in float64, layer by layer as its config says, without a cache: every token sees its past."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from numba_engine.model.config import LayerConfig, ModelConfig
from numba_engine.model.rope import inverse_frequencies
from tests.reference import ops


def forward(config: ModelConfig, tensors: Mapping[str, np.ndarray], token_ids: Sequence[int]) -> np.ndarray:
    """Logits [tokens, vocab]; ``tensors`` by the full names of ``model/tensors.py``."""
    residual = ops.embedding(np.asarray(token_ids), tensors["embed_tokens"], config.embedding_scale)
    for i, layer in enumerate(config.layers):
        prefix = f"layers.{i}."
        own = {name.removeprefix(prefix): values for name, values in tensors.items() if name.startswith(prefix)}
        residual = _layer(config, layer, own, residual)
    last = ops.rms_norm(residual, tensors["final_norm"], config.rms_norm_eps)
    logits = ops.linear(last, tensors["embed_tokens" if config.tie_word_embeddings else "lm_head"])
    return ops.cap_logits(logits, config.logit_scale, config.logit_softcap)


def _layer(config: ModelConfig, layer: LayerConfig, own: Mapping[str, np.ndarray], residual: np.ndarray) -> np.ndarray:
    eps, scale = config.rms_norm_eps, layer.residual_scale
    qkv = ops.linear(ops.rms_norm(residual, own["attn_norm"], eps), own["qkv_proj"], own.get("qkv_bias"))
    out = _attention(layer, own, qkv, eps)
    residual = ops.linear_norm_add(residual, out, own["o_proj"], own.get("attn_out_norm"), eps, scale)
    gate_up = ops.linear(ops.rms_norm(residual, own["mlp_norm"], eps), own["gate_up_proj"])
    mlp = ops.gated_activation(gate_up, layer.activation)
    return ops.linear_norm_add(residual, mlp, own["down_proj"], own.get("mlp_out_norm"), eps, scale)


def _attention(layer: LayerConfig, own: Mapping[str, np.ndarray], qkv: np.ndarray, eps: float) -> np.ndarray:
    shape, num_tokens = layer.attention, len(qkv)
    if "q_norm" in own:
        qkv = ops.head_norm(qkv, own["q_norm"], own["k_norm"], shape.num_heads, shape.num_kv_heads, eps)
    if layer.rope is not None:
        angles = np.outer(np.arange(num_tokens), inverse_frequencies(layer.rope, shape.head_dim))
        num_rotated = shape.num_heads + shape.num_kv_heads
        qkv = ops.rope(qkv, np.arange(num_tokens), np.cos(angles), np.sin(angles), num_rotated)
    block = np.zeros((1, shape.num_kv_heads, num_tokens, shape.head_dim))  # one that holds all tokens
    k, v = ops.store_kv(block, block, qkv, np.arange(num_tokens))
    lens, table = np.array([num_tokens]), np.zeros((1, 1), dtype=np.int64)
    return ops.attention(
        qkv, k, v, np.array([0, num_tokens]), lens, table, shape.num_heads, shape.scale, shape.window, shape.softcap
    )
