"""A fake clock and a model with weights of known size."""

from __future__ import annotations

import numpy as np
import pytest

from numba_engine.backends.arrays import KVCacheLayer, Norm, RopeTable, Weight
from numba_engine.backends.layers import Attention, GatedMlp, Layer
from numba_engine.formats import BF16, F16, Q4_0, Q4_1, Q8_0, Format, StoredTensor
from numba_engine.model.decoder import Decoder
from numba_engine.model.weights import ModelWeights
from tests.profiling.idle_backend import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    LAYERS,
    QKV,
    VOCAB,
    CountedModel,
    FakeClock,
    IdleBackend,
    Q,
)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def model(clock: FakeClock) -> CountedModel:
    backend = IdleBackend(clock)
    total = 0

    def stored(rows: int, columns: int, format: Format) -> StoredTensor:
        nonlocal total
        tensor = StoredTensor("t", format, (rows, columns), np.zeros((rows, format.row_bytes(columns)), np.uint8))
        total += tensor.nbytes
        return tensor

    def weight(*tensors: StoredTensor) -> Weight:
        return backend.load_weight("w", tensors)

    def vector(length: int) -> np.ndarray:
        nonlocal total
        total += 4 * length
        return np.zeros(length, np.float32)

    def norm(length: int) -> Norm:
        return Norm(vector(length), 1e-5)

    rope = RopeTable(cos=np.zeros((64, HEAD_DIM // 2), np.float32), sin=np.zeros((64, HEAD_DIM // 2), np.float32))
    layers = tuple(
        Layer(
            attention=Attention(HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5, rope=rope),
            attn_norm=norm(HIDDEN),
            qkv_proj=weight(
                stored(Q, HIDDEN, Q4_1),
                stored(KV_HEADS * HEAD_DIM, HIDDEN, Q4_1),
                stored(KV_HEADS * HEAD_DIM, HIDDEN, Q8_0),
            ),
            qkv_bias=vector(QKV),
            q_norm=norm(HEAD_DIM),
            k_norm=norm(HEAD_DIM),
            o_proj=weight(stored(HIDDEN, Q, Q4_0)),
            mlp=GatedMlp(
                norm=norm(HIDDEN),
                gate_up_proj=weight(stored(INTERMEDIATE, HIDDEN, BF16), stored(INTERMEDIATE, HIDDEN, BF16)),
                activation="silu",
                down_proj=weight(stored(HIDDEN, INTERMEDIATE, F16)),
            ),
        )
        for _ in range(LAYERS)
    )
    table = weight(stored(VOCAB, HIDDEN, Q8_0))
    weights = ModelWeights(embed_tokens=table, layers=layers, final_norm=norm(HIDDEN), lm_head=table)
    cache_shape = (8, KV_HEADS, 16, HEAD_DIM)
    return CountedModel(
        decoder=Decoder(weights),
        kv_cache=tuple(
            KVCacheLayer(np.zeros(cache_shape, np.float16), np.zeros(cache_shape, np.float16)) for _ in range(LAYERS)
        ),
        weight_bytes=total,
        embedding_row_bytes=Q8_0.row_bytes(HIDDEN),
    )
