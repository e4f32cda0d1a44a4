"""Layers: everything in which the layers of a model may differ, as values that ops take."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from numba_engine.backends.arrays import Array, Norm, RopeTable, Weight

Activation = Literal["silu", "gelu_tanh"]
"""silu(x) = x / (1 + exp(-x)) (SwiGLU; Shazeer 2020), or the tanh form of GELU (GeGLU; Hendrycks & Gimpel 2016),
x / (1 + exp(-g)) with g = GELU_LINEAR · x + GELU_CUBIC · x³."""
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
GELU_LINEAR = 2 * math.sqrt(2 / math.pi)
GELU_CUBIC = 0.044715 * GELU_LINEAR


@dataclass(frozen=True, slots=True)
class Attention:
    """What attention, and what prepares its heads, does in one layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Of the scores before softmax: head_dim ** -0.5 in most models."""
    window: int | None = None
    """A token sees itself and the window - 1 tokens before it; None sees all."""
    softcap: float | None = None
    """Scores s become softcap · tanh(s / softcap); None leaves them (Gemma 2)."""
    rope: RopeTable | None = None
    """None where positions do not rotate q and k."""

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True, eq=False)
class GatedMlp:
    """down_proj(activation(gate) · up) of the normed residual, normed again where the model does so."""

    norm: Norm
    gate_up_proj: Weight  # [2 intermediate, hidden], gate rows first
    activation: Activation
    down_proj: Weight  # [hidden, intermediate]
    out_norm: Norm | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One decoder layer: residual += attention(norm(residual)), then residual += mlp(norm(residual))."""

    attention: Attention
    attn_norm: Norm
    qkv_proj: Weight  # [(H + 2 KV) D, hidden]
    qkv_bias: Array | None  # [(H + 2 KV) D] float32 (Qwen2)
    q_norm: Norm | None  # of each q head by itself, [D] (Qwen3)
    k_norm: Norm | None
    o_proj: Weight  # [hidden, H D]
    mlp: GatedMlp
    attn_out_norm: Norm | None = None
    residual_scale: float = 1.0
    """What attention and mlp give is multiplied with it before it is added to the residual (Granite)."""

    @property
    def matrices(self) -> dict[str, Weight]:
        """By name, in the order in which a step streams them."""
        return {
            "qkv_proj": self.qkv_proj,
            "o_proj": self.o_proj,
            "gate_up_proj": self.mlp.gate_up_proj,
            "down_proj": self.mlp.down_proj,
        }

    @property
    def vectors(self) -> Iterator[Array]:
        """Norm weights and biases."""
        norms = (self.attn_norm, self.q_norm, self.k_norm, self.attn_out_norm, self.mlp.norm, self.mlp.out_norm)
        yield from (norm.weight for norm in norms if norm is not None)
        if self.qkv_bias is not None:
            yield self.qkv_bias
