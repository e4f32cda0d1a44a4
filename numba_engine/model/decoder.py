"""Decoder: one forward pass of a Llama-family transformer, in the phases that stream weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from numba_engine.backends.base import AttentionShape, Backend, Batch, KVCacheLayer, RopeTable
from numba_engine.model.activations import Activations
from numba_engine.model.config import ModelConfig
from numba_engine.model.weights import ModelWeights


@dataclass(frozen=True, slots=True, eq=False)
class Decoder:
    """A model ready to run: its weights, its rotation table and the shape of its attention."""

    weights: ModelWeights
    rope_table: RopeTable
    shape: AttentionShape

    def forward(self, ops: Backend, batch: Batch, kv_cache: Sequence[KVCacheLayer], act: Activations) -> None:
        """Fill ``act.logits`` with the next-token logits of ``batch.logit_rows`` and the cache with the new k and v."""
        weights, shape, eps = self.weights, self.shape, self.shape.rms_norm_eps
        ops.embedding(act.residual, batch.token_ids, weights.embed_tokens)
        for layer, cache in zip(weights.layers, kv_cache, strict=True):
            ops.norm_qkv_rope_store(act.qkv, act.normed, act.residual, layer, cache, batch, self.rope_table, shape)
            ops.attention(act.attn_out, act.qkv, cache, batch, shape)
            ops.linear_add(act.residual, act.attn_out, layer.o_proj)
            ops.norm_gate_up_silu(act.mlp_out, act.gate_up, act.normed, act.residual, layer, eps)
            ops.linear_add(act.residual, act.mlp_out, layer.down_proj)
        if batch.num_logits:
            ops.norm_lm_head(
                act.logits, act.last, act.residual, batch.logit_rows, weights.final_norm, weights.lm_head, eps
            )


def attention_shape(config: ModelConfig) -> AttentionShape:
    return AttentionShape(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        sliding_window=config.sliding_window,
    )
