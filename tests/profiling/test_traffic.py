"""Traffic by formula: against numbers worked out by hand and against counting token by token."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from numba_engine.backends import traffic
from numba_engine.backends.base import OPS
from numba_engine.backends.traffic import Traffic, visible_tokens
from tests.profiling.idle_backend import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, QKV, CountedModel, Q


def test_every_op_has_a_formula_with_its_own_signature() -> None:
    assert OPS
    for name, op in OPS.items():
        assert tuple(inspect.signature(op.traffic).parameters) == op.parameters, name
        assert op.traffic.__name__ == name


@pytest.mark.parametrize("window", [None, 1, 5, 16])
@pytest.mark.parametrize(
    ("query_lens", "context_lens"), [([1], [1]), ([1], [40]), ([7], [7]), ([3, 1, 33], [9, 33, 34])]
)
def test_visible_tokens_equal_counting_them(query_lens: list[int], context_lens: list[int], window: int | None) -> None:
    pairs = distinct = 0
    for query_len, context_len in zip(query_lens, context_lens, strict=True):
        seen: set[int] = set()
        for position in range(context_len - query_len, context_len):
            first = 0 if window is None else max(0, position - window + 1)
            visible = range(first, position + 1)
            pairs += len(visible)
            seen.update(visible)
        distinct += len(seen)
    assert visible_tokens(np.array(query_lens), np.array(context_lens), window) == (pairs, distinct)


def test_attention_reads_keys_and_values_once_per_kv_head(model: CountedModel) -> None:
    batch = model.batch([1, 3], [20, 3])
    out, qkv = np.empty((4, Q), np.float32), np.empty((4, QKV), np.float32)
    counted = traffic.attention(out, qkv, model.kv_cache[0], batch, model.decoder.weights.layers[0].attention)
    assert counted == Traffic(
        kv_read_bytes=2 * (20 + 3) * KV_HEADS * HEAD_DIM * 2,
        activation_read_bytes=4 * Q * 4 + 4 * (2 + 1) + 4 * 2 + 4 * 3,  # q, block tables, lengths, offsets
        activation_written_bytes=4 * Q * 4,
        flops=4 * HEADS * HEAD_DIM * (20 + 1 + 2 + 3),
    )


def test_linear_counts_weights_once_however_many_rows(model: CountedModel) -> None:
    layer = model.decoder.weights.layers[0]
    x, out = np.empty((5, HIDDEN), np.float32), np.empty((5, QKV), np.float32)
    weight_bytes = (96 + 32) * 3 * 20 + 32 * 3 * 34
    assert traffic.linear(out, x, layer.qkv_proj, layer.qkv_bias) == Traffic(
        weight_bytes=weight_bytes + QKV * 4,
        activation_read_bytes=5 * HIDDEN * 4,
        activation_written_bytes=5 * QKV * 4,
        flops=2 * 5 * QKV * HIDDEN + 5 * QKV,
    )
    assert traffic.linear(out, x, layer.qkv_proj).weight_bytes == weight_bytes


def test_linear_add_reads_and_writes_the_residual(model: CountedModel) -> None:
    x, residual = np.empty((5, Q), np.float32), np.empty((5, HIDDEN), np.float32)
    assert traffic.linear_add(residual, x, model.decoder.weights.layers[0].o_proj) == Traffic(
        weight_bytes=HIDDEN * Q // 32 * 18,
        activation_read_bytes=5 * (Q + HIDDEN) * 4,
        activation_written_bytes=5 * HIDDEN * 4,
        flops=2 * 5 * HIDDEN * Q + 5 * HIDDEN,
    )


def test_rope_and_store_kv_touch_their_own_heads_only(model: CountedModel) -> None:
    qkv, shape = np.empty((3, QKV), np.float32), model.decoder.weights.layers[0].attention
    rotated = traffic.rope(qkv, np.zeros(3, np.int32), shape)
    assert rotated.activation_written_bytes == 3 * (HEADS + KV_HEADS) * HEAD_DIM * 4
    assert rotated.activation_read_bytes == rotated.activation_written_bytes + 3 * (4 + HEAD_DIM * 4)
    stored = traffic.store_kv(model.kv_cache[0], qkv, np.zeros(3, np.int32), shape)
    assert stored == Traffic(
        kv_written_bytes=3 * 2 * KV_HEADS * HEAD_DIM * 2, activation_read_bytes=3 * (2 * KV_HEADS * HEAD_DIM * 4 + 4)
    )


def test_a_matrix_vector_product_is_two_flops_a_weight(model: CountedModel) -> None:
    weights = model.decoder.weights
    x, out = np.empty((1, HIDDEN), np.float32), np.empty((1, weights.lm_head.shape[0]), np.float32)
    counted = traffic.linear(out, x, weights.lm_head)
    assert counted.flops == 2 * weights.lm_head.shape[0] * weights.lm_head.shape[1]
