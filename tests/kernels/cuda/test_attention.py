"""attention: groups, head sizes, block and segment borders, windows, chunks of a prompt; the same bits everywhere."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from numba_engine.backends.arrays import Batch, KVCacheLayer
from numba_engine.backends.cuda.backend import CudaBackend
from numba_engine.backends.cuda.kernels.attention import SEGMENT
from numba_engine.backends.cuda.kernels.fma_attention import THREADS
from numba_engine.backends.layers import Attention
from numba_engine.backends.ptx import PtxDevice
from numba_engine.config import EngineConfig, KVCacheDtype
from numba_engine.errors import BackendUnavailableError
from tests.kernels.cuda.conftest import backend_on, filled, nmse, normal
from tests.reference import ops as reference


class Case:
    """Sequences of (query_len, context_len) over a cache of shuffled blocks; slots that nobody wrote hold NaN."""

    def __init__(
        self,
        rng: np.random.Generator,
        shape: Attention,
        sequences: list[tuple[int, int]],
        kv_dtype: str = "float32",
        block_size: int = 16,
    ) -> None:
        self.shape, self.sequences = shape, sequences
        needed = [-(-context // block_size) for _, context in sequences]
        order = iter(rng.permutation(sum(needed)).tolist())
        self.tables = np.zeros((len(sequences), max(needed) + 1), dtype=np.int32)
        size = (sum(needed), shape.num_kv_heads, block_size, shape.head_dim)
        self.k, self.v = (normal(rng, *size).astype(kv_dtype) for _ in range(2))
        for table, count, (_, context) in zip(self.tables, needed, sequences, strict=True):
            table[:count] = [next(order) for _ in range(count)]
            for cache in (self.k, self.v):
                cache[table[count - 1], :, (context - 1) % block_size + 1 :] = np.nan
        self.cu_seqlens_q = np.concatenate([[0], np.cumsum([q for q, _ in sequences])]).astype(np.int32)
        self.context_lens = np.array([context for _, context in sequences], dtype=np.int32)
        width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        self.qkv = normal(rng, int(self.cu_seqlens_q[-1]), width)

    def expected(self) -> np.ndarray:
        shape = self.shape
        return reference.attention(
            self.qkv,
            np.nan_to_num(self.k),
            np.nan_to_num(self.v),
            self.cu_seqlens_q,
            self.context_lens,
            self.tables,
            shape.num_heads,
            shape.scale,
            shape.window,
            shape.softcap,
        )

    def run(self, backend: CudaBackend, only: tuple[int, int] | None = None, padded_context: int = 0) -> np.ndarray:
        """All rows in one batch, or ``only`` (sequence, row of it) as one step of decode.

        The batch may say that its contexts are longer than they are, as a recorded graph does.
        """
        qkv, tables, context_lens, cu_seqlens_q = self.qkv, self.tables, self.context_lens, self.cu_seqlens_q
        if only is not None:
            s, row = only
            left = self.sequences[s][0] - 1 - row
            qkv = qkv[cu_seqlens_q[s] + row :][:1]
            tables, context_lens = tables[s : s + 1], context_lens[s : s + 1] - np.int32(left)
            cu_seqlens_q = np.array([0, 1], dtype=np.int32)
        nothing = backend.upload(np.zeros(1, dtype=np.int32))
        batch = Batch(
            token_ids=nothing,
            positions=nothing,
            slot_mapping=nothing,
            cu_seqlens_q=backend.upload(cu_seqlens_q),
            context_lens=backend.upload(context_lens),
            block_tables=backend.upload(tables),
            logit_rows=nothing,
            num_tokens=len(qkv),
            num_seqs=len(context_lens),
            num_logits=0,
            max_query_len=int(np.diff(cu_seqlens_q).max()),
            max_context_len=max(int(context_lens.max()), padded_context),
        )
        out = filled(backend, len(qkv), self.shape.num_heads * self.shape.head_dim)
        cache = KVCacheLayer(backend.upload(self.k), backend.upload(self.v))
        backend.attention(out, backend.upload(qkv), cache, batch, self.shape)
        return backend.download(out)


BORDERS = [(1, 1), (1, 15), (1, 16), (1, 17), (1, SEGMENT - 1), (1, SEGMENT), (1, SEGMENT + 1), (1, 3 * SEGMENT + 7)]
MIXED = [(7, 7), (1, 33), (5, 260), (33, 257)]


@pytest.mark.parametrize("sequences", [BORDERS, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("kv_dtype", ["float32", "float16"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 64), (4, 4, 80), (4, 1, 128)])
def test_equals_the_reference(
    device: str,
    rng: np.random.Generator,
    heads: int,
    kv_heads: int,
    head_dim: int,
    kv_dtype: KVCacheDtype,
    sequences: list[tuple[int, int]],
) -> None:
    case = Case(rng, Attention(heads, kv_heads, head_dim, head_dim**-0.5), sequences, kv_dtype)
    assert nmse(case.run(backend_on(device, kv_dtype)), case.expected()) < 1e-11


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(3, 3, 32), (16, 1, 64), (2, 1, 256), (1, 1, 8)])
def test_other_groups_and_head_sizes(
    backend: CudaBackend, rng: np.random.Generator, heads: int, kv_heads: int, head_dim: int
) -> None:
    case = Case(rng, Attention(heads, kv_heads, head_dim, head_dim**-0.5), [(3, 40), (1, 270)], block_size=8)
    assert nmse(case.run(backend), case.expected()) < 1e-11


@pytest.mark.parametrize("window", [1, 16, 33, 300])
def test_a_window_hides_what_is_older(backend: CudaBackend, rng: np.random.Generator, window: int) -> None:
    shape = Attention(6, 2, 64, 64**-0.5, window)
    for sequences in ([(1, 600), (1, 20)], [(9, 530), (40, 40)]):
        case = Case(rng, shape, sequences)
        assert nmse(case.run(backend), case.expected()) < 1e-11


@pytest.mark.parametrize(
    ("kv_dtype", "heads", "kv_heads", "head_dim", "window"),
    [("float32", 6, 2, 64, None), ("float16", 6, 2, 64, None), ("float16", 4, 1, 128, 300), ("float16", 3, 3, 80, 70)],
)
def test_a_row_is_the_same_bits_in_prefill_and_in_decode(
    device: str,
    rng: np.random.Generator,
    kv_dtype: KVCacheDtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None,
) -> None:
    """In decode the context is split over blocks and merged; in prefill one block walks it."""
    case = Case(
        rng, Attention(heads, kv_heads, head_dim, head_dim**-0.5, window), [(20, 20), (9, 600), (1, 290)], kv_dtype
    )
    backend = backend_on(device, kv_dtype)
    together = case.run(backend)
    for s, row in [(0, 0), (0, 13), (1, 0), (1, 8), (2, 0)]:
        np.testing.assert_array_equal(case.run(backend, (s, row))[0], together[case.cu_seqlens_q[s] + row])


@pytest.mark.parametrize("kv_dtype", ["float32", "float16"])
def test_splits_of_a_padded_grid_are_merged_at_every_launch(
    device: str, rng: np.random.Generator, kv_dtype: KVCacheDtype
) -> None:
    """More splits than the contexts have, with a window that hides the first of them; blocks in other company."""
    shape = Attention(9, 1, 64, 64**-0.5, 300)
    case = Case(rng, shape, [(1, 1), (1, 257), (1, 1100)], kv_dtype)
    backend = backend_on(device, kv_dtype)
    first = case.run(backend, padded_context=5 * SEGMENT + 1)
    assert nmse(first, case.expected()) < 1e-11
    np.testing.assert_array_equal(case.run(backend, padded_context=9 * SEGMENT), first)
    if device == "ptx":
        one_by_one = CudaBackend(PtxDevice(lanes=THREADS), EngineConfig(kv_cache_dtype=kv_dtype), name="ptx")
        np.testing.assert_array_equal(case.run(one_by_one), first)


@pytest.mark.parametrize("kv_dtype", ["float32", "float16"])
def test_decode_beside_a_prefill_is_split(rng: np.random.Generator, kv_dtype: KVCacheDtype) -> None:
    case = Case(rng, Attention(2, 1, 64, 64**-0.5), [(70, 70), (1, 4 * SEGMENT + 1)], kv_dtype)
    device = PtxDevice(counting=True)
    assert (
        nmse(case.run(CudaBackend(device, EngineConfig(kv_cache_dtype=kv_dtype), name="ptx")), case.expected()) < 1e-11
    )
    arrays = device.launches[0].arrays.values()
    parts = [array for array in arrays if array.nbytes == 2 * 5 * 8 * 64 * 4]
    assert [array.store.bytes for array in parts] == [5 * 2 * 64 * 4]  # 5 segments of 2 heads
    assert len(device.launches) == (2 if kv_dtype == "float16" else 1)


def test_prefill_on_tensor_cores_meets_no_bank_twice_and_reads_tiles_once(rng: np.random.Generator) -> None:
    case = Case(rng, Attention(4, 1, 128, 128**-0.5), [(16, 2 * SEGMENT)], "float16")
    device = PtxDevice(counting=True)
    case.run(CudaBackend(device, EngineConfig(kv_cache_dtype="float16"), name="ptx"))
    (launch,) = device.launches
    assert launch.shared_wavefronts == launch.shared_wavefronts_ideal
    caches = [array for array in launch.arrays.values() if array.nbytes == case.k.nbytes]
    assert [array.load.bytes for array in caches] == [case.k.nbytes] * 2
    assert launch.warp_instructions_by_class["tensor"] == 4 * 8 * (256 + 32)  # warps, tiles, products and ldmatrix


def test_large_scores_do_not_overflow(backend: CudaBackend, device: str, rng: np.random.Generator) -> None:
    case = Case(rng, Attention(2, 1, 64, 64**-0.5), [(1, 300)])
    case.qkv *= np.float32(100)
    assert nmse(case.run(backend), case.expected()) < 1e-8
    case = Case(rng, Attention(2, 1, 64, 64**-0.5), [(9, 300), (1, 300)], "float16")
    case.qkv *= np.float32(100)
    assert nmse(case.run(backend_on(device, "float16")), case.expected()) < 1e-7


@pytest.mark.parametrize("kv_dtype", ["float32", "float16"])
@pytest.mark.parametrize(("head_dim", "window", "softcap"), [(64, None, 2.5), (64, 40, 2.5)])
def test_softcap(
    device: str, rng: np.random.Generator, head_dim: int, window: int | None, softcap: float, kv_dtype: KVCacheDtype
) -> None:
    """Of scores up to 20 times as large, in decode and in a prompt, by tensor cores (float16) and without."""
    shape = Attention(4, 2, head_dim, 10 * head_dim**-0.5, window, softcap)
    case = Case(rng, shape, [(1, 300), (19, 70)], kv_dtype)
    out = case.run(backend_on(device, kv_dtype))
    assert nmse(out, case.expected()) < 1e-9
    case.shape = replace(shape, softcap=None)
    assert nmse(out, case.expected()) > 1e-3


def test_a_head_size_it_cannot_take_is_refused(backend: CudaBackend, rng: np.random.Generator) -> None:
    case = Case(rng, Attention(2, 1, 64, 64**-0.5), [(1, 3)])
    case.shape = replace(case.shape, head_dim=264)
    with pytest.raises(BackendUnavailableError, match="264"):
        case.run(backend)
