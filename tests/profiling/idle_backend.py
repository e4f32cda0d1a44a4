"""A backend that computes nothing, and a model with weights of known size, for counting and timing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from numba_engine.backends.arrays import Batch, KVCacheLayer, Segment, Weight
from numba_engine.backends.base import Backend
from numba_engine.backends.ops import Op
from numba_engine.formats import StoredTensor
from numba_engine.model.activations import Activations, LayerActivations
from numba_engine.model.decoder import Decoder


class FakeClock:
    """A clock that stands still unless an op moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class IdleBackend(Backend):
    """Every op does nothing and takes ``op_s`` of the fake clock; ``ran`` lists the names."""

    name = "idle"
    device_name = "nothing"
    num_threads = 3
    activation_dtype = np.dtype(np.float32)
    kv_cache_dtype = np.dtype(np.float16)
    quantized_matmul_dtype = "float32"
    kv_cache_share = 0.5

    def __init__(self, clock: FakeClock, op_s: float = 0.001) -> None:
        self.clock = clock
        self.op_s = op_s
        self.ran: list[str] = []

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        return np.empty(shape, dtype)

    def upload(self, host: np.ndarray) -> np.ndarray:
        return host.copy()

    def download(self, array: Any) -> np.ndarray:
        return np.array(array)

    def load_weight(self, name: str, tensors: Sequence[StoredTensor]) -> Weight:
        segments = tuple(Segment(t.format, t.shape[0], t.nbytes, t.data) for t in tensors)
        return Weight(name, (sum(t.shape[0] for t in tensors), tensors[0].shape[1]), segments)

    def synchronize(self) -> None: ...

    def free_memory_bytes(self) -> int:
        return 2**30

    def read_bandwidth_gbps(self) -> float:
        return 10.0

    def run(self, op: Op, args: tuple[Any, ...]) -> None:
        if op.is_fused and not self.fuses(op):
            op.compose(self, *args)
            return
        self.ran.append(op.name)
        self.clock.now += self.op_s

    def fuses(self, op: Op) -> bool:
        return False


class FusingBackend(IdleBackend):
    """Fuses two of the three fused ops."""

    def fuses(self, op: Op) -> bool:
        return op.name in ("norm_qkv_rope_store", "norm_lm_head")


@dataclass(frozen=True, slots=True)
class CountedModel:
    """Two layers, GQA 3, mixed formats, q/k norm and bias; and the bytes of its stored tensors."""

    decoder: Decoder
    kv_cache: tuple[KVCacheLayer, ...]
    weight_bytes: int
    embedding_row_bytes: int

    def batch(self, query_lens: list[int], context_lens: list[int]) -> Batch:
        num_tokens = sum(query_lens)
        return Batch(
            token_ids=np.zeros(num_tokens, np.int32),
            positions=np.zeros(num_tokens, np.int32),
            slot_mapping=np.zeros(num_tokens, np.int32),
            cu_seqlens_q=np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32),
            context_lens=np.array(context_lens, np.int32),
            block_tables=np.zeros((len(query_lens), 8), np.int32),
            logit_rows=(np.cumsum(query_lens) - 1).astype(np.int32),
            num_tokens=num_tokens,
            num_seqs=len(query_lens),
            num_logits=len(query_lens),
            max_query_len=max(query_lens),
            max_context_len=max(context_lens),
        )

    def forward(self, ops: Backend, batch: Batch) -> None:
        t, rows = batch.num_tokens, batch.num_logits
        residual, normed, last = (np.empty((n, HIDDEN), np.float32) for n in (t, t, rows))
        of_layer = LayerActivations(*(np.empty((t, n), np.float32) for n in (QKV, Q, 2 * INTERMEDIATE, INTERMEDIATE)))
        logits = np.empty((rows, VOCAB), np.float32)
        activations = Activations(residual, normed, (of_layer,) * LAYERS, last, logits)
        self.decoder.forward(ops, batch, self.kv_cache, activations)


HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB, LAYERS = 96, 6, 2, 16, 160, 257, 2
Q, QKV = HEADS * HEAD_DIM, (HEADS + 2 * KV_HEADS) * HEAD_DIM
