"""Activations: the buffers a forward pass writes, allocated once for the largest step and sliced for each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from numba_engine.backends.arrays import Array
from numba_engine.backends.base import Backend
from numba_engine.model.config import LayerConfig, ModelConfig


@dataclass(frozen=True, slots=True, eq=False)
class LayerActivations:
    """Buffers of T tokens inside a layer; layers of equal sizes share them."""

    qkv: Array  # [T, (H + 2 KV) D]
    attn_out: Array  # [T, H D]
    gate_up: Array  # [T, 2 intermediate]
    mlp_out: Array  # [T, intermediate]

    def rows(self, num_tokens: int) -> LayerActivations:
        return LayerActivations(
            qkv=self.qkv[:num_tokens],
            attn_out=self.attn_out[:num_tokens],
            gate_up=self.gate_up[:num_tokens],
            mlp_out=self.mlp_out[:num_tokens],
        )


@dataclass(frozen=True, slots=True, eq=False)
class Activations:
    """Buffers of T tokens and L rows of logits. Everything but the logits is of the backend's activation dtype."""

    residual: Array  # [T, hidden]
    normed: Array  # [T, hidden]
    layers: tuple[LayerActivations, ...]
    last: Array  # [L, hidden]
    logits: Array  # [L, vocab] float32

    @classmethod
    def allocate(cls, config: ModelConfig, max_tokens: int, max_logits: int, backend: Backend) -> Activations:
        def empty(rows: int, features: int) -> Array:
            return backend.empty((rows, features), backend.activation_dtype)

        def of_sizes(qkv_size: int, q_size: int, intermediate_size: int) -> LayerActivations:
            return LayerActivations(
                qkv=empty(max_tokens, qkv_size),
                attn_out=empty(max_tokens, q_size),
                gate_up=empty(max_tokens, 2 * intermediate_size),
                mlp_out=empty(max_tokens, intermediate_size),
            )

        by_sizes = {sizes: of_sizes(*sizes) for sizes in dict.fromkeys(map(_sizes, config.layers))}
        return cls(
            residual=empty(max_tokens, config.hidden_size),
            normed=empty(max_tokens, config.hidden_size),
            layers=tuple(by_sizes[_sizes(layer)] for layer in config.layers),
            last=empty(max_logits, config.hidden_size),
            logits=backend.empty((max_logits, config.vocab_size), np.dtype(np.float32)),
        )

    def rows(self, num_tokens: int, num_logits: int) -> Activations:
        """Views of the first rows: what a step of this size uses."""
        layers = {layer: layer.rows(num_tokens) for layer in dict.fromkeys(self.layers)}
        return Activations(
            residual=self.residual[:num_tokens],
            normed=self.normed[:num_tokens],
            layers=tuple(layers[layer] for layer in self.layers),
            last=self.last[:num_logits],
            logits=self.logits[:num_logits],
        )


def _sizes(layer: LayerConfig) -> tuple[int, int, int]:
    """Features of qkv, of attn_out and of mlp_out."""
    shape = layer.attention
    qkv_heads = shape.num_heads + 2 * shape.num_kv_heads
    return qkv_heads * shape.head_dim, shape.num_heads * shape.head_dim, layer.intermediate_size
