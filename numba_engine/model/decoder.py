"""Decoder: one forward pass of a decoder-only transformer, in the fused ops that stream weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from numba_engine.backends.arrays import Batch, KVCacheLayer
from numba_engine.backends.base import Backend
from numba_engine.model.activations import Activations
from numba_engine.model.weights import ModelWeights


@dataclass(frozen=True, slots=True, eq=False)
class Decoder:
    """A model ready to run."""

    weights: ModelWeights

    def forward(self, ops: Backend, batch: Batch, kv_cache: Sequence[KVCacheLayer], act: Activations) -> None:
        """Fill ``act.logits`` with the next-token logits of ``batch.logit_rows`` and the cache with the new k and v."""
        weights, residual, normed = self.weights, act.residual, act.normed
        ops.embedding(residual, batch.token_ids, weights.embed_tokens, weights.embedding_scale)
        for layer, cache, a in zip(weights.layers, kv_cache, act.layers, strict=True):
            scale = layer.residual_scale
            ops.norm_qkv_rope_store(a.qkv, normed, residual, layer, cache, batch)
            ops.attention(a.attn_out, a.qkv, cache, batch, layer.attention)
            ops.linear_norm_add(residual, normed, a.attn_out, layer.o_proj, layer.attn_out_norm, scale)
            ops.norm_gate_up_act(a.mlp_out, a.gate_up, normed, residual, layer.mlp)
            ops.linear_norm_add(residual, normed, a.mlp_out, layer.mlp.down_proj, layer.mlp.out_norm, scale)
        if batch.num_logits:
            ops.norm_lm_head(act.logits, act.last, residual, batch.logit_rows, weights.final_norm, weights.lm_head)
            if weights.logit_scale != 1.0 or weights.logit_softcap is not None:
                ops.cap_logits(act.logits, weights.logit_scale, weights.logit_softcap)
