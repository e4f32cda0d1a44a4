"""Bytes of a model and traffic of one forward pass through it, from its config: no array is made."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from numba_engine.backends.arrays import Batch, KVCacheLayer, RopeTable
from numba_engine.backends.base import OPS
from numba_engine.backends.traffic import Traffic
from numba_engine.model.activations import Activations
from numba_engine.model.config import ModelConfig
from numba_engine.model.decoder import Decoder
from numba_engine.model.tensors import Tensor
from numba_engine.model.weights import build_weights

_BLOCK_SIZE = 16
_BYTE, _HALF, _SINGLE, _INDEX = (np.dtype(type) for type in (np.uint8, np.float16, np.float32, np.int32))


@dataclass(frozen=True, slots=True)
class TensorBits:
    """Bits a value, in the mean of each group of tensors."""

    embed_tokens: float
    lm_head: float
    matrices: float
    vectors: float

    def matrix(self, tensor: Tensor) -> Any:
        bits = {"embed_tokens": self.embed_tokens, "lm_head": self.lm_head}.get(tensor.name, self.matrices)
        return _stored(tensor.shape, bits)

    def vector(self, tensor: Tensor) -> Any:
        return _stored(tensor.shape, self.vectors)


def model_bytes(config: ModelConfig, bits: TensorBits) -> int:
    """Of all weights together; a tied head is the embedding."""
    without_layers = build_weights(replace(config, layers=()), bits).nbytes
    return without_layers + sum(
        count * (build_weights(replace(config, layers=(layer,)), bits).nbytes - without_layers)
        for layer, count in Counter(config.layers).items()
    )


@dataclass(frozen=True, slots=True)
class ForwardTraffic:
    """Of one forward pass, counted by the formulas of ``traffic.py``: of its attention, and of all else."""

    without_attention: Traffic
    attention: Traffic


def forward_traffic(config: ModelConfig, bits: TensorBits, batch: int, query_len: int, context: int) -> ForwardTraffic:
    """Of ``query_len`` new tokens, the last of ``context``, for each of ``batch`` sequences. Activations are float16.

    Keys and values are counted at a byte a value: the caller scales to the KV format, which may hold a fraction of one.
    """
    arrays = _batch(batch, query_len, context)
    outside = _decoder_traffic(replace(config, layers=()), bits, arrays)
    rest, attention = outside["rest"], outside["attention"]
    for layer, count in Counter(config.layers).items():
        counted = _decoder_traffic(replace(config, layers=(layer,)), bits, arrays)
        rest += (counted["rest"] + outside["rest"] * -1) * count
        attention += counted["attention"] * count
    return ForwardTraffic(rest, attention)


def _decoder_traffic(config: ModelConfig, bits: TensorBits, batch: Batch) -> dict[str, Traffic]:
    """What the decoder's calls move: those of attention, and the rest."""
    counted = {"attention": Traffic(), "rest": Traffic()}

    class Counting:
        activation_dtype = _HALF

        def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> _Sized:
            return _array(shape, dtype)

        def __getattr__(self, name: str) -> Any:
            def call(*args: Any) -> None:
                part = "attention" if OPS[name].reads_context else "rest"
                counted[part] += OPS[name].traffic(*args)

            return call

    ops: Any = Counting()
    caches, tables = [], []
    for layer in config.layers:
        shape = layer.attention
        keys = _array((1, shape.num_kv_heads, _BLOCK_SIZE, shape.head_dim), _BYTE)
        angles = _array((config.max_position, shape.head_dim // 2), _SINGLE)
        caches.append(KVCacheLayer(keys, keys))
        tables.append(None if layer.rope is None else RopeTable(angles, angles))
    activations = Activations.allocate(config, batch.num_tokens, batch.num_logits, ops)
    Decoder(build_weights(config, bits).with_rope(tables)).forward(ops, batch, caches, activations)
    return counted


def _batch(num_seqs: int, query_len: int, context: int) -> Batch:
    indices = _array((num_seqs * query_len,), _INDEX)
    return Batch(
        token_ids=indices,
        positions=indices,
        slot_mapping=indices,
        cu_seqlens_q=np.arange(num_seqs + 1, dtype=np.int64) * query_len,
        context_lens=np.full(num_seqs, context, dtype=np.int64),
        block_tables=indices,
        logit_rows=_array((num_seqs,), _INDEX),
        num_tokens=num_seqs * query_len,
        num_seqs=num_seqs,
        num_logits=num_seqs,
        max_query_len=query_len,
        max_context_len=context,
    )


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
