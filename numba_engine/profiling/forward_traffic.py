"""Bytes of a model and traffic of one forward pass through it, from its config: no array is made."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from numba_engine.backends import traffic
from numba_engine.backends.arrays import Batch, KVCacheLayer, Norm, RopeTable
from numba_engine.backends.layers import GatedMlp, Layer
from numba_engine.backends.traffic import Traffic
from numba_engine.model.config import ModelConfig
from numba_engine.model.weights import attention_of

_BLOCK_SIZE = 16
_BYTE, _HALF, _SINGLE, _INDEX = (np.dtype(type) for type in (np.uint8, np.float16, np.float32, np.int32))


@dataclass(frozen=True, slots=True)
class TensorBits:
    """Bits a value, in the mean of each group of tensors."""

    embed_tokens: float
    lm_head: float
    matrices: float
    vectors: float


def model_bytes(config: ModelConfig, bits: TensorBits) -> int:
    """Of all weights together; a tied head is the embedding."""
    layer = _layer(config, bits)
    per_layer = sum(weight.nbytes for weight in layer.matrices.values())
    per_layer += sum(vector.nbytes for vector in layer.vectors)
    table = (config.vocab_size, config.hidden_size)
    head_bytes = 0 if config.tie_word_embeddings else _stored(table, bits.lm_head).nbytes
    final_norm = _stored((config.hidden_size,), bits.vectors)
    return config.num_layers * per_layer + _stored(table, bits.embed_tokens).nbytes + head_bytes + final_norm.nbytes


class ForwardTraffic:
    """The phases of one forward pass, counted by the formulas of ``traffic.py``.

    ``query_len`` new tokens, the last of ``context``, for each of ``batch`` sequences. Activations are float16.
    Keys and values are counted at a byte a value: the caller scales to the KV format, which may hold a fraction of one.
    """

    def __init__(self, config: ModelConfig, bits: TensorBits, batch: int, query_len: int, context: int) -> None:
        c = config
        self._config, self._bits = config, bits
        self._num_tokens, self._num_seqs = batch * query_len, batch
        self._layer = _layer(c, bits)
        keys = _array((1, c.num_kv_heads, _BLOCK_SIZE, c.head_dim), _BYTE)
        self._cache = KVCacheLayer(keys, keys)
        indices = _array((self._num_tokens,), _INDEX)
        self._batch = Batch(
            token_ids=indices,
            positions=indices,
            slot_mapping=indices,
            cu_seqlens_q=np.arange(batch + 1, dtype=np.int64) * query_len,
            context_lens=np.full(batch, context, dtype=np.int64),
            block_tables=indices,
            logit_rows=_array((batch,), _INDEX),
            num_tokens=self._num_tokens,
            num_seqs=batch,
            num_logits=batch,
            max_query_len=query_len,
            max_context_len=context,
        )

    def without_attention(self) -> Traffic:
        """Embedding, all layers but their attention, final norm and head."""
        return self._embedding() + self._one_layer() * self._config.num_layers + self._head()

    def attention(self) -> Traffic:
        c = self._config
        out = self._rows(c.num_heads * c.head_dim)
        return traffic.attention(out, self._qkv(), self._cache, self._batch, self._layer.attention) * c.num_layers

    def _embedding(self) -> Traffic:
        c = self._config
        table = _stored((c.vocab_size, c.hidden_size), self._bits.embed_tokens)
        return traffic.embedding(self._rows(c.hidden_size), self._batch.token_ids, table)

    def _one_layer(self) -> Traffic:
        c = self._config
        hidden, attn_out = self._rows(c.hidden_size), self._rows(c.num_heads * c.head_dim)
        mlp_out, gate_up = self._rows(c.intermediate_size), self._rows(2 * c.intermediate_size)
        layer = self._layer
        counted = traffic.norm_qkv_rope_store(self._qkv(), hidden, hidden, layer, self._cache, self._batch)
        counted += traffic.linear_add(hidden, attn_out, layer.o_proj)
        counted += traffic.norm_gate_up_act(mlp_out, gate_up, hidden, hidden, layer.mlp)
        return counted + traffic.linear_add(hidden, mlp_out, layer.mlp.down_proj)

    def _head(self) -> Traffic:
        c = self._config
        head_bits = self._bits.embed_tokens if c.tie_word_embeddings else self._bits.lm_head
        return traffic.norm_lm_head(
            _array((self._num_seqs, c.vocab_size), _SINGLE),
            _array((self._num_seqs, c.hidden_size), _HALF),
            self._rows(c.hidden_size),
            self._batch.logit_rows,
            _norm(c, c.hidden_size, self._bits),
            _stored((c.vocab_size, c.hidden_size), head_bits),
        )

    def _qkv(self) -> _Sized:
        c = self._config
        return self._rows((c.num_heads + 2 * c.num_kv_heads) * c.head_dim)

    def _rows(self, features: int) -> _Sized:
        return _array((self._num_tokens, features), _HALF)


def _layer(config: ModelConfig, bits: TensorBits) -> Layer:
    c = config
    q_size = c.num_heads * c.head_dim
    qkv_size = q_size + 2 * c.num_kv_heads * c.head_dim
    rope = _array((c.max_position, c.head_dim // 2), _SINGLE)
    return Layer(
        attention=replace(attention_of(c), rope=RopeTable(rope, rope)),
        attn_norm=_norm(c, c.hidden_size, bits),
        qkv_proj=_stored((qkv_size, c.hidden_size), bits.matrices),
        qkv_bias=_stored((qkv_size,), bits.vectors) if c.has_qkv_bias else None,
        q_norm=_norm(c, c.head_dim, bits) if c.has_qk_norm else None,
        k_norm=_norm(c, c.head_dim, bits) if c.has_qk_norm else None,
        o_proj=_stored((c.hidden_size, q_size), bits.matrices),
        mlp=GatedMlp(
            norm=_norm(c, c.hidden_size, bits),
            gate_up_proj=_stored((2 * c.intermediate_size, c.hidden_size), bits.matrices),
            activation="silu",
            down_proj=_stored((c.hidden_size, c.intermediate_size), bits.matrices),
        ),
    )


def _norm(config: ModelConfig, size: int, bits: TensorBits) -> Norm:
    return Norm(_stored((size,), bits.vectors), config.rms_norm_eps)


@dataclass(frozen=True, slots=True)
class _Sized:
    """Stands for an array or a weight: the formulas look at nothing else."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    nbytes: int

    @property
    def looked_up_row_bytes(self) -> int:
        return self.nbytes // self.shape[0]

    def __getitem__(self, rows: slice) -> _Sized:
        raise AssertionError("the formulas look at sizes only")


def _array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> _Sized:
    return _Sized(shape, dtype, math.prod(shape) * dtype.itemsize)


def _stored(shape: tuple[int, ...], bits: float) -> Any:
    """Of any format: a ``Weight`` proper knows only those that the engine has kernels for."""
    return _Sized(shape, _HALF, round(math.prod(shape) * bits / 8))
