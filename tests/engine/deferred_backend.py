"""A device that works beside the host, made of the CPU backend: ops wait in a queue until the host asks for a result.

So whatever the engine takes for granted about steps in flight (what an array holds, when a block is written) is put to
the test: nothing has happened yet when the next step is launched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from numba_engine.backends.arrays import Array, Batch, KVCacheLayer, Weight
from numba_engine.backends.capture import CaptureBackend
from numba_engine.backends.cpu.backend import CpuBackend
from numba_engine.backends.layers import Attention
from numba_engine.backends.ops import Op
from numba_engine.backends.sampling import Sampled, Sampling
from numba_engine.config import EngineConfig
from numba_engine.formats import StoredTensor

Command = Callable[[], None]


class DeferredGraph:
    def __init__(self, queue: list[Command]) -> None:
        self.ops: list[Command] = []
        self._queue = queue

    @property
    def num_launches(self) -> int:
        return len(self.ops)

    def replay(self) -> None:
        self._queue.extend(self.ops)


class DeferredDownload:
    def __init__(self, backend: DeferredBackend, array: np.ndarray) -> None:
        self._backend = backend
        self._array = array
        self._host: np.ndarray | None = None
        backend.enqueue(self._copy)

    def wait(self) -> np.ndarray:
        """Runs no more than it must."""
        while self._host is None:
            self._backend.run_next()
        self._backend.note("read", self._array)
        return self._host

    def _copy(self) -> None:
        self._host = self._array.copy()


class DeferredBackend(CaptureBackend):
    """``log`` tells in which order steps were launched (captured or ``anew``) and their tokens read."""

    name = "deferred"
    kv_cache_share = 0.25

    def __init__(self, config: EngineConfig) -> None:
        inner = CpuBackend(replace(config, backend="cpu", fusion=False))
        self.inner = inner
        self.device_name, self.num_threads = inner.device_name, inner.num_threads
        self.activation_dtype, self.kv_cache_dtype = inner.activation_dtype, inner.kv_cache_dtype
        self.quantized_matmul_dtype = inner.quantized_matmul_dtype
        self.log: list[str] = []
        self.num_graphs = 0
        self._queue: list[Command] = []
        self._capturing: DeferredGraph | None = None
        self._sampled_anew: Array | None = None

    # ---- the queue -------------------------------------------------------------------------------------------------

    def enqueue(self, op: Command) -> None:
        (self._queue if self._capturing is None else self._capturing.ops).append(op)

    def run_next(self) -> None:
        self._queue.pop(0)()

    def synchronize(self) -> None:
        assert self._capturing is None
        while self._queue:
            self.run_next()

    @contextmanager
    def capture(self) -> Iterator[DeferredGraph]:
        self._capturing = DeferredGraph(self._queue)
        yield self._capturing
        self._capturing = None
        self.num_graphs += 1

    # ---- memory ----------------------------------------------------------------------------------------------------

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return self.inner.empty(shape, dtype)

    def upload(self, host: np.ndarray) -> Array:
        assert self._capturing is None
        return host.copy()

    def write(self, array: Array, host: np.ndarray) -> None:
        assert self._capturing is None
        assert isinstance(array, np.ndarray)
        assert (array.shape, array.dtype) == (host.shape, host.dtype)
        self.enqueue(partial(np.copyto, array, host.copy()))

    def download(self, array: Array) -> np.ndarray:
        self.synchronize()
        if array is self._sampled_anew:
            self.log += ["anew", "read"]
        return self.inner.download(array)

    def download_later(self, array: Array) -> DeferredDownload:
        assert self._capturing is None
        assert isinstance(array, np.ndarray)
        self.note("launch", array)
        return DeferredDownload(self, array)

    def note(self, what: str, array: np.ndarray) -> None:
        """Of what a step samples, only the tokens count."""
        if array.ndim == 1 and array.dtype == np.int32:
            self.log.append(what)

    def load_weight(self, name: str, tensors: Sequence[StoredTensor]) -> Weight:
        return self.inner.load_weight(name, tensors)

    def free_memory_bytes(self) -> int:
        return self.inner.free_memory_bytes()

    def read_bandwidth_gbps(self) -> float:
        return 1.0

    # ---- ops -------------------------------------------------------------------------------------------------------

    def run(self, op: Op, args: tuple[Any, ...]) -> Any:
        if op.is_fused:
            return op.compose(self, *args)
        return self.enqueue(lambda: getattr(self.inner, op.name)(*args))

    def store_kv(self, cache: KVCacheLayer, qkv: Array, slot_mapping: Array, shape: Attention) -> None:
        def op() -> None:
            n = int(np.count_nonzero(np.asarray(slot_mapping) >= 0))
            self.inner.store_kv(cache, qkv[:n], slot_mapping[:n], shape)

        self.enqueue(op)

    def attention(self, out: Array, qkv: Array, cache: KVCacheLayer, batch: Batch, shape: Attention) -> None:
        def op() -> None:
            n = int(np.count_nonzero(np.asarray(batch.context_lens)))
            longest = int(np.asarray(batch.context_lens).max())
            assert longest <= batch.max_context_len
            rows = int(np.asarray(batch.cu_seqlens_q)[n])
            real = replace(
                batch,
                cu_seqlens_q=batch.cu_seqlens_q[: n + 1],
                context_lens=batch.context_lens[:n],
                block_tables=batch.block_tables[:n],
                num_seqs=n,
                num_tokens=rows,
                max_context_len=longest,
            )
            if n:
                self.inner.attention(out[:rows], qkv[:rows], cache, real, shape)

        self.enqueue(op)

    def sample(self, out: Sampled, logits: Array, sampling: Sampling) -> None:
        self._sampled_anew = out.token_ids
        self.enqueue(lambda: self.inner.sample(out, logits, sampling))

    def advance(self, batch: Batch, sampling: Sampling, token_ids: Array, block_size: int) -> None:
        drawn = token_ids

        def op() -> None:
            arrays = (batch.token_ids, batch.positions, batch.slot_mapping, batch.context_lens, sampling.output_index)
            token_ids, positions, slot_mapping, context_lens, index = map(np.asarray, arrays)
            lists = (sampling.history_begins, sampling.history_ends, sampling.history, drawn)
            begins, ends, history, last = map(np.asarray, lists)
            for row in np.flatnonzero(context_lens):
                position = int(context_lens[row])
                block = int(np.asarray(batch.block_tables)[row, position // block_size])
                token_ids[row], positions[row] = last[row], position
                slot_mapping[row] = block * block_size + position % block_size
                context_lens[row] += 1
                index[row] += np.uint32(1)
                if ends[row] > begins[row]:
                    history[ends[row]] = last[row]
                    ends[row] += 1

        self.enqueue(op)
