"""Activations: the buffers a forward pass writes, allocated once for the largest step and sliced for each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from numba_engine.backends.arrays import Array
from numba_engine.backends.base import Backend
from numba_engine.model.config import ModelConfig


@dataclass(frozen=True, slots=True, eq=False)
class Activations:
    """Buffers of T tokens and L rows of logits. Everything but the logits is of the backend's activation dtype."""

    residual: Array  # [T, hidden]
    normed: Array  # [T, hidden]
    qkv: Array  # [T, (H + 2 KV) D]
    attn_out: Array  # [T, H D]
    gate_up: Array  # [T, 2 intermediate]
    mlp_out: Array  # [T, intermediate]
    last: Array  # [L, hidden]
    logits: Array  # [L, vocab] float32

    @classmethod
    def allocate(cls, config: ModelConfig, max_tokens: int, max_logits: int, backend: Backend) -> Activations:
        def empty(rows: int, features: int) -> Array:
            return backend.empty((rows, features), backend.activation_dtype)

        q_size = config.num_heads * config.head_dim
        return cls(
            residual=empty(max_tokens, config.hidden_size),
            normed=empty(max_tokens, config.hidden_size),
            qkv=empty(max_tokens, q_size + 2 * config.num_kv_heads * config.head_dim),
            attn_out=empty(max_tokens, q_size),
            gate_up=empty(max_tokens, 2 * config.intermediate_size),
            mlp_out=empty(max_tokens, config.intermediate_size),
            last=empty(max_logits, config.hidden_size),
            logits=backend.empty((max_logits, config.vocab_size), np.dtype(np.float32)),
        )

    def rows(self, num_tokens: int, num_logits: int) -> Activations:
        """Views of the first rows: what a step of this size uses."""
        return Activations(
            residual=self.residual[:num_tokens],
            normed=self.normed[:num_tokens],
            qkv=self.qkv[:num_tokens],
            attn_out=self.attn_out[:num_tokens],
            gate_up=self.gate_up[:num_tokens],
            mlp_out=self.mlp_out[:num_tokens],
            last=self.last[:num_logits],
            logits=self.logits[:num_logits],
        )
