"""Bytes and FLOPs of every op, from shapes and storage formats alone.

One function an op, with the op's own signature (``backends/base.py``): it looks at ``shape``, ``dtype`` and ``nbytes``
and never at contents, so anything with those three serves as an array. Only attention needs values, the lengths of the
sequences, and wants ``cu_seqlens_q`` and ``context_lens`` of the batch as host arrays.

What is counted is what an ideal kernel moves between memory and itself: each input read once, each output written once.

- Weights: the bytes of the stored tensor, once per op however many rows share them. Embedding: the rows looked up.
- KV: written once per token; read once per KV head and sequence, however many query heads and query tokens share it,
  and only the tokens that some query sees (causal, windowed).
- Activations: arrays between ops, index arrays and RoPE tables included; not what stays inside a fused op.
- FLOPs: a multiply and an add are two; exp, division and square root one each. Dequantising is not counted, nor is the
  softmax inside attention (under 2 % of it at head_dim 64).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from numba_engine.backends.arrays import Array, Batch, KVCacheLayer, Norm, RopeTable, Weight
from numba_engine.backends.layers import Activation, Attention, GatedMlp, Layer
from numba_engine.backends.sampling import Sampled, Sampling

RMS_NORM_FLOPS_PER_VALUE = 4  # square, accumulate, times 1/rms, times weight
ROPE_FLOPS_PER_VALUE = 3  # (a cos - b sin, b cos + a sin): six for a pair
GATED_ACTIVATION_FLOPS_PER_VALUE = {"silu": 5, "gelu_tanh": 9}  # negate, exp, add, divide, times up; and 2y of x
SOFTCAP_FLOPS_PER_VALUE = 6  # over softcap, and of tanh: exp, add, divide, subtract; times softcap
SAMPLE_FLOPS_PER_LOGIT = 4  # over temperature, minus maximum, exp, accumulate


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one call moves and computes, by formula."""

    weight_bytes: int = 0
    kv_read_bytes: int = 0
    kv_written_bytes: int = 0
    activation_read_bytes: int = 0
    activation_written_bytes: int = 0
    flops: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.weight_bytes + other.weight_bytes,
            self.kv_read_bytes + other.kv_read_bytes,
            self.kv_written_bytes + other.kv_written_bytes,
            self.activation_read_bytes + other.activation_read_bytes,
            self.activation_written_bytes + other.activation_written_bytes,
            self.flops + other.flops,
        )

    def __mul__(self, repetitions: int) -> Traffic:
        return Traffic(
            self.weight_bytes * repetitions,
            self.kv_read_bytes * repetitions,
            self.kv_written_bytes * repetitions,
            self.activation_read_bytes * repetitions,
            self.activation_written_bytes * repetitions,
            self.flops * repetitions,
        )


# ---- fused ops -----------------------------------------------------------------------------------------------------


def norm_qkv_rope_store(
    qkv: Array, normed: Array, residual: Array, layer: Layer, cache: KVCacheLayer, batch: Batch
) -> Traffic:
    """Fused: the residual comes in, q goes out, k and v go straight to the cache."""
    attention = layer.attention
    parts = rms_norm(normed, residual, layer.attn_norm)
    parts += linear(qkv, normed, layer.qkv_proj, layer.qkv_bias)
    if layer.q_norm is not None and layer.k_norm is not None:
        parts += head_norm(qkv, layer.q_norm, layer.k_norm, attention)
    index_bytes = batch.slot_mapping.nbytes
    if attention.rope is not None:
        parts += rope(qkv, batch.positions, attention)
        index_bytes += _rope_table_bytes(batch.positions, attention.rope)
    parts += store_kv(cache, qkv, batch.slot_mapping, attention)
    return Traffic(
        weight_bytes=parts.weight_bytes,
        kv_written_bytes=parts.kv_written_bytes,
        activation_read_bytes=residual.nbytes + index_bytes,
        activation_written_bytes=qkv.shape[0] * attention.num_heads * attention.head_dim * qkv.dtype.itemsize,
        flops=parts.flops,
    )


def linear_norm_add(
    residual: Array, normed: Array, x: Array, weight: Weight, out_norm: Norm | None, scale: float
) -> Traffic:
    """Fused: x and the residual come in, the residual goes out."""
    if out_norm is None and scale == 1.0:
        return linear_add(residual, x, weight)
    parts = linear(normed, x, weight) + add(residual, normed, scale)
    if out_norm is not None:
        parts += rms_norm(normed, normed, out_norm)
    return Traffic(
        weight_bytes=parts.weight_bytes,
        activation_read_bytes=x.nbytes + residual.nbytes,
        activation_written_bytes=residual.nbytes,
        flops=parts.flops,
    )


def norm_gate_up_act(mlp_out: Array, gate_up: Array, normed: Array, residual: Array, mlp: GatedMlp) -> Traffic:
    """Fused: the residual comes in, mlp_out goes out."""
    parts = rms_norm(normed, residual, mlp.norm)
    parts += linear(gate_up, normed, mlp.gate_up_proj) + gated_activation(mlp_out, gate_up, mlp.activation)
    return Traffic(
        weight_bytes=parts.weight_bytes,
        activation_read_bytes=residual.nbytes,
        activation_written_bytes=mlp_out.nbytes,
        flops=parts.flops,
    )


def norm_lm_head(logits: Array, last: Array, residual: Array, rows: Array, norm: Norm, lm_head: Weight) -> Traffic:
    """Fused: the rows that want logits come in, the logits go out."""
    parts = rms_norm(last, last, norm) + linear(logits, last, lm_head)
    return Traffic(
        weight_bytes=parts.weight_bytes,
        activation_read_bytes=last.nbytes + rows.nbytes,
        activation_written_bytes=logits.nbytes,
        flops=parts.flops,
    )


# ---- unfused ops ---------------------------------------------------------------------------------------------------


def embedding(out: Array, token_ids: Array, table: Weight, scale: float) -> Traffic:
    """T rows of the table. The factor is not counted: in most models it is 1."""
    return Traffic(
        weight_bytes=token_ids.shape[0] * table.looked_up_row_bytes,
        activation_read_bytes=token_ids.nbytes,
        activation_written_bytes=out.nbytes,
    )


def rms_norm(out: Array, x: Array, norm: Norm) -> Traffic:
    return Traffic(
        weight_bytes=norm.nbytes,
        activation_read_bytes=x.nbytes,
        activation_written_bytes=out.nbytes,
        flops=_size(x) * RMS_NORM_FLOPS_PER_VALUE,
    )


def linear(out: Array, x: Array, weight: Weight, bias: Array | None = None) -> Traffic:
    """2 · R · out_features · in_features FLOPs, and one add a value for the bias."""
    out_features, in_features = weight.shape
    return Traffic(
        weight_bytes=weight.nbytes + (bias.nbytes if bias is not None else 0),
        activation_read_bytes=x.nbytes,
        activation_written_bytes=out.nbytes,
        flops=2 * x.shape[0] * out_features * in_features + (_size(out) if bias is not None else 0),
    )


def linear_add(residual: Array, x: Array, weight: Weight) -> Traffic:
    """As linear, with the residual read, added to and written back."""
    product = linear(residual, x, weight)
    return product + Traffic(activation_read_bytes=residual.nbytes, flops=_size(residual))


def add(residual: Array, x: Array, scale: float) -> Traffic:
    return Traffic(
        activation_read_bytes=residual.nbytes + x.nbytes,
        activation_written_bytes=residual.nbytes,
        flops=2 * _size(residual),
    )


def rope(qkv: Array, positions: Array, shape: Attention) -> Traffic:
    """The q and k heads, in place, and one row of cos and of sin a token."""
    assert shape.rope is not None
    num_values = qkv.shape[0] * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    return Traffic(
        activation_read_bytes=num_values * qkv.dtype.itemsize + _rope_table_bytes(positions, shape.rope),
        activation_written_bytes=num_values * qkv.dtype.itemsize,
        flops=num_values * ROPE_FLOPS_PER_VALUE,
    )


def head_norm(qkv: Array, q_norm: Norm, k_norm: Norm, shape: Attention) -> Traffic:
    """The q and k heads, in place."""
    num_values = qkv.shape[0] * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    return Traffic(
        weight_bytes=q_norm.nbytes + k_norm.nbytes,
        activation_read_bytes=num_values * qkv.dtype.itemsize,
        activation_written_bytes=num_values * qkv.dtype.itemsize,
        flops=num_values * RMS_NORM_FLOPS_PER_VALUE,
    )


def store_kv(cache: KVCacheLayer, qkv: Array, slot_mapping: Array, shape: Attention) -> Traffic:
    """T keys and T values of every KV head, in the cache's element type."""
    num_values = 2 * qkv.shape[0] * shape.num_kv_heads * shape.head_dim
    return Traffic(
        kv_written_bytes=num_values * cache.k.dtype.itemsize,
        activation_read_bytes=num_values * qkv.dtype.itemsize + slot_mapping.nbytes,
    )


def attention(out: Array, qkv: Array, cache: KVCacheLayer, batch: Batch, shape: Attention) -> Traffic:
    """4 · H · D FLOPs for every (query token, visible token); K and V of every visible token once per KV head.

    A query token at position p sees min(p + 1, window) tokens; the last q tokens of a context of c together see
    min(c, window + q - 1).
    """
    context_lens = np.asarray(batch.context_lens, dtype=np.int64)
    query_lens = np.diff(np.asarray(batch.cu_seqlens_q, dtype=np.int64))
    num_pairs, num_visible = visible_tokens(query_lens, context_lens, shape.window)
    block_size = cache.k.shape[2]
    indices = int((-(-context_lens // block_size)).sum()) * 4 + batch.context_lens.nbytes + batch.cu_seqlens_q.nbytes
    return Traffic(
        kv_read_bytes=2 * num_visible * shape.num_kv_heads * shape.head_dim * cache.k.dtype.itemsize,
        activation_read_bytes=_size(out) * qkv.dtype.itemsize + indices,
        activation_written_bytes=out.nbytes,
        flops=4 * shape.num_heads * shape.head_dim * num_pairs,
    )


def visible_tokens(query_lens: np.ndarray, context_lens: np.ndarray, window: int | None) -> tuple[int, int]:
    """(pairs of query token and token it sees, distinct tokens seen), summed over sequences.

    ``query_lens`` and ``context_lens`` are int64 ``[S]``; the queries are the last tokens of their context.
    """
    first_sees = context_lens - query_lens + 1
    limit = np.int64(2**62) if window is None else np.int64(window)
    growing = np.clip(limit - first_sees, 0, query_lens)  # queries that still see their whole past
    pairs = growing * first_sees + growing * (growing - 1) // 2
    if window is not None:
        pairs = pairs + (query_lens - growing) * limit
    distinct = np.where(query_lens > 0, np.minimum(context_lens, limit + query_lens - 1), 0)
    return int(pairs.sum()), int(distinct.sum())


def gated_activation(out: Array, gate_up: Array, activation: Activation) -> Traffic:
    return Traffic(
        activation_read_bytes=gate_up.nbytes,
        activation_written_bytes=out.nbytes,
        flops=_size(out) * GATED_ACTIVATION_FLOPS_PER_VALUE[activation],
    )


def gather_rows(out: Array, x: Array, rows: Array) -> Traffic:
    return Traffic(activation_read_bytes=out.nbytes + rows.nbytes, activation_written_bytes=out.nbytes)


def cap_logits(logits: Array, scale: float, softcap: float | None) -> Traffic:
    """The logits, in place."""
    flops_per_value = 1 if softcap is None else 1 + SOFTCAP_FLOPS_PER_VALUE
    return Traffic(
        activation_read_bytes=logits.nbytes,
        activation_written_bytes=logits.nbytes,
        flops=_size(logits) * flops_per_value,
    )


def sample(out: Sampled, logits: Array, sampling: Sampling) -> Traffic:
    """The logits once. Rows that filter or want log-probabilities pass over them more often, mostly from cache."""
    return Traffic(activation_read_bytes=logits.nbytes, flops=_size(logits) * SAMPLE_FLOPS_PER_LOGIT)


def _size(array: Array) -> int:
    size = 1
    for extent in array.shape:
        size *= extent
    return size


def _rope_table_bytes(positions: Array, table: RopeTable) -> int:
    """A position and its row of cos and sin, a token."""
    return positions.nbytes + positions.shape[0] * 2 * table.cos.shape[1] * table.cos.dtype.itemsize
