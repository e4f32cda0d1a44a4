"""A device that works beside the host, made of the CPU backend: ops wait in a queue until the host asks for a result.

So whatever the engine takes for granted about steps in flight (what an array holds, when a block is written) is put to
the test: nothing has happened yet when the next step is launched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from numba_engine.backends.arrays import Array, Batch, KVCacheLayer, Weight
from numba_engine.backends.cpu.backend import CpuBackend
from numba_engine.backends.layers import Attention
from numba_engine.backends.ops import Op
from numba_engine.backends.replay import DecodeSampling, Drawn, ReplayBackend
from numba_engine.backends.sampling import Sampled, SamplingBatch
from numba_engine.config import EngineConfig
from numba_engine.formats import StoredTensor

Command = Callable[[], None]


class DeferredRecording:
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


class DeferredBackend(ReplayBackend):
    """``log`` tells in which order steps were launched (recorded or ``anew``) and their tokens read."""

    name = "deferred"
    kv_cache_share = 0.25

    def __init__(self, config: EngineConfig) -> None:
        inner = CpuBackend(replace(config, backend="cpu", fusion=False))
        self.inner = inner
        self.device_name, self.num_threads = inner.device_name, inner.num_threads
        self.activation_dtype, self.kv_cache_dtype = inner.activation_dtype, inner.kv_cache_dtype
        self.quantized_matmul_dtype = inner.quantized_matmul_dtype
        self.log: list[str] = []
        self.num_recordings = 0
        self._queue: list[Command] = []
        self._recording: DeferredRecording | None = None

    # ---- the queue -------------------------------------------------------------------------------------------------

    def enqueue(self, op: Command) -> None:
        (self._queue if self._recording is None else self._recording.ops).append(op)

    def run_next(self) -> None:
        self._queue.pop(0)()

    def synchronize(self) -> None:
        assert self._recording is None
        while self._queue:
            self.run_next()

    @contextmanager
    def record(self) -> Iterator[DeferredRecording]:
        self._recording = DeferredRecording(self._queue)
        yield self._recording
        self._recording = None
        self.num_recordings += 1

    # ---- memory ----------------------------------------------------------------------------------------------------

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return self.inner.empty(shape, dtype)

    def upload(self, host: np.ndarray) -> Array:
        assert self._recording is None
        return host.copy()

    def write(self, array: Array, host: np.ndarray) -> None:
        assert self._recording is None
        assert isinstance(array, np.ndarray)
        assert (array.shape, array.dtype) == (host.shape, host.dtype)
        self.enqueue(partial(np.copyto, array, host.copy()))

    def download(self, array: Array) -> np.ndarray:
        self.synchronize()
        return self.inner.download(array)

    def download_later(self, array: Array) -> DeferredDownload:
        assert self._recording is None
        assert isinstance(array, np.ndarray)
        self.note("launch", array)
        return DeferredDownload(self, array)

    def note(self, what: str, array: np.ndarray) -> None:
        """Of what a step draws, only the tokens count."""
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

    def sample(self, logits: Array, sampling: SamplingBatch) -> Sampled:
        self.synchronize()
        self.log += ["anew", "read"]
        return self.inner.sample(logits, sampling)

    def draw(self, drawn: Drawn, logits: Array, sampling: DecodeSampling) -> None:
        num_top = -1 if drawn.top_token_ids is None else drawn.top_token_ids.shape[1]

        def op() -> None:
            sampled = self.inner.sample(logits, _with_lists_end_to_end(sampling, num_top))
            for name in ("token_ids", "logprobs", "top_token_ids", "top_logprobs")[: 1 if num_top < 0 else 4]:
                np.copyto(getattr(drawn, name), getattr(sampled, name))

        self.enqueue(op)

    def advance(self, batch: Batch, sampling: DecodeSampling, token_ids: Array, block_size: int) -> None:
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


def _with_lists_end_to_end(sampling: DecodeSampling, num_top_logprobs: int) -> SamplingBatch:
    def end_to_end(begins: Array, ends: Array, *lists: Array) -> tuple[np.ndarray, ...]:
        spans = list(zip(np.asarray(begins).tolist(), np.asarray(ends).tolist(), strict=True))
        offsets = np.array([0, *accumulate(end - begin for begin, end in spans)], np.int32)
        values = (np.concatenate([np.asarray(values)[begin:end] for begin, end in spans]) for values in lists)
        return offsets, *values

    s = sampling
    history_offsets, history = end_to_end(s.history_begins, s.history_ends, s.history)
    bias_offsets, bias_ids, bias_values = end_to_end(s.bias_begins, s.bias_ends, s.bias_token_ids, s.bias_values)
    return SamplingBatch(
        temperature=s.temperature,
        top_k=s.top_k,
        top_p=s.top_p,
        min_p=s.min_p,
        repetition_penalty=s.repetition_penalty,
        presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty,
        seed=s.seed,
        output_index=s.output_index,
        history_offsets=history_offsets,
        history=history,
        history_prompt_lens=s.history_prompt_lens,
        bias_offsets=bias_offsets,
        bias_token_ids=bias_ids,
        bias_values=bias_values,
        num_logits=s.seed.shape[0],
        num_top_logprobs=num_top_logprobs,
    )
