"""attention against the reference: groups, head sizes, block borders, windows, chunks of a prompt, invariance."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from numba_engine.backends.arrays import Batch, KVCacheLayer
from numba_engine.backends.cpu.backend import CpuBackend
from numba_engine.backends.layers import Attention
from numba_engine.config import KVCacheDtype
from tests.kernels.conftest import MakeBackend
from tests.reference import ops as reference

NO_ARRAY = np.empty(0, dtype=np.int32)


class Case:
    """Sequences of (query_len, context_len) over a cache whose blocks are shuffled."""

    def __init__(
        self,
        rng: np.random.Generator,
        shape: Attention,
        sequences: Sequence[tuple[int, int]],
        *,
        kv_dtype: str = "float32",
        block_size: int = 16,
    ) -> None:
        self.shape = shape
        needed = [-(-context // block_size) for _, context in sequences]
        num_blocks = sum(needed) + 2
        size = (num_blocks, shape.num_kv_heads, block_size, shape.head_dim)
        self.cache = KVCacheLayer(*(rng.standard_normal(size).astype(kv_dtype) for _ in "kv"))
        self.cache.k[-1] = self.cache.v[-1] = np.nan  # nobody's block
        order = rng.permutation(num_blocks - 1)
        self.tables = np.zeros((len(sequences), max(needed) + 1), dtype=np.int32)
        at = 0
        for s, ((_, context), count) in enumerate(zip(sequences, needed, strict=True)):
            self.tables[s, :count] = order[at : at + count]
            at += count
            if context % block_size:  # slots not yet written hold anything
                for cache in (self.cache.k, self.cache.v):
                    cache[self.tables[s, count - 1], :, context % block_size :] = np.nan
        self.cu_seqlens = np.concatenate([[0], np.cumsum([q for q, _ in sequences])]).astype(np.int32)
        self.context_lens = np.array([c for _, c in sequences], dtype=np.int32)
        width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        self.qkv = rng.standard_normal((int(self.cu_seqlens[-1]), width), dtype=np.float32)

    def run(self, backend: CpuBackend) -> np.ndarray:
        return self.run_rows(backend, self.qkv, self.cu_seqlens, self.context_lens, self.tables)

    def run_rows(
        self,
        backend: CpuBackend,
        qkv: np.ndarray,
        cu_seqlens: np.ndarray,
        context_lens: np.ndarray,
        tables: np.ndarray,
    ) -> np.ndarray:
        out = np.empty((len(qkv), self.shape.num_heads * self.shape.head_dim), dtype=np.float32)
        batch = Batch(
            token_ids=NO_ARRAY,
            positions=NO_ARRAY,
            slot_mapping=NO_ARRAY,
            cu_seqlens_q=cu_seqlens,
            context_lens=context_lens,
            block_tables=tables,
            logit_rows=NO_ARRAY,
            num_tokens=len(qkv),
            num_seqs=len(context_lens),
            num_logits=0,
            max_query_len=int(np.diff(cu_seqlens).max()),
            max_context_len=int(context_lens.max()),
        )
        backend.attention(out, qkv, self.cache, batch, self.shape)
        return out

    def expected(self) -> np.ndarray:
        s = self.shape
        return reference.attention(
            self.qkv, self.cache.k, self.cache.v, self.cu_seqlens, self.context_lens, self.tables, s.num_heads,
            s.scale, s.window, s.softcap,
        )  # fmt: skip


def shape_of(heads: int, kv_heads: int, head_dim: int, window: int | None = None) -> Attention:
    return Attention(heads, kv_heads, head_dim, head_dim**-0.5, window)


@pytest.mark.parametrize("kv_dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(9, 3, 64), (2, 2, 80), (8, 2, 128), (8, 1, 24), (16, 2, 16)],
    ids=lambda n: str(n),
)
def test_equals_the_reference(
    make_backend: MakeBackend,
    rng: np.random.Generator,
    heads: int,
    kv_heads: int,
    head_dim: int,
    kv_dtype: KVCacheDtype,
) -> None:
    backend = make_backend(kv_cache_dtype=kv_dtype)
    sequences = [(1, 1), (1, 16), (1, 17), (7, 7), (3, 64), (5, 65), (1, 333), (33, 150)]
    for some in (sequences, sequences[6:7], sequences[1:2]):
        case = Case(rng, shape_of(heads, kv_heads, head_dim), some, kv_dtype=kv_dtype)
        np.testing.assert_allclose(case.run(backend), case.expected(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("softcap", [2.5, 50.0])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "window"), [(9, 3, 64, None), (2, 2, 80, 70)])
def test_softcap(
    make_backend: MakeBackend,
    rng: np.random.Generator,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None,
    softcap: float,
) -> None:
    """Of scores up to 20 times as large: one token, a few, many and long contexts."""
    shape = Attention(heads, kv_heads, head_dim, 10 * head_dim**-0.5, window, softcap)
    for sequences in ([(1, 333)], [(1, 17), (7, 7), (5, 65), (33, 150)]):
        case = Case(rng, shape, sequences)
        out = case.run(make_backend(kv_cache_dtype="float32"))
        np.testing.assert_allclose(out, case.expected(), rtol=0, atol=4e-5)
        case.shape = shape_of(heads, kv_heads, head_dim, window)
        assert np.abs(out - case.expected()).max() > 0.1


@pytest.mark.parametrize("block_size", [8, 128])
def test_block_sizes(make_backend: MakeBackend, rng: np.random.Generator, block_size: int) -> None:
    case = Case(rng, shape_of(9, 3, 64), [(1, 127), (1, 129), (20, 257)], block_size=block_size)
    np.testing.assert_allclose(case.run(make_backend(kv_cache_dtype="float32")), case.expected(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("window", [1, 5, 64, 100])
def test_sliding_window(make_backend: MakeBackend, rng: np.random.Generator, window: int) -> None:
    backend = make_backend(kv_cache_dtype="float32")
    for sequences in ([(1, 300)], [(40, 40), (9, 200), (1, 3)]):
        case = Case(rng, shape_of(4, 2, 64, window), sequences)
        np.testing.assert_allclose(case.run(backend), case.expected(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("window", [None, 70])
def test_a_token_is_the_same_bits_in_any_chunk_batch_and_on_any_threads(
    make_backend: MakeBackend, rng: np.random.Generator, window: int | None
) -> None:
    case = Case(rng, shape_of(9, 3, 64, window), [(200, 200), (130, 260)], kv_dtype="float16")
    together = case.run(make_backend(num_threads=3))
    one_thread = make_backend(num_threads=1)
    assert np.array_equal(case.run(one_thread), together)
    for s, (begin, end) in enumerate(zip(case.cu_seqlens, case.cu_seqlens[1:], strict=False)):
        for chunk, backend in ((1, make_backend(num_threads=3)), (7, one_thread), (64, make_backend())):
            for row in range(begin, end, chunk):
                stop = min(row + chunk, end)
                alone = case.run_rows(
                    backend,
                    case.qkv[row:stop],
                    np.array([0, stop - row], dtype=np.int32),
                    np.array([case.context_lens[s] - (end - stop)], dtype=np.int32),
                    case.tables[s : s + 1],
                )
                assert np.array_equal(alone, together[row:stop])


def test_scores_far_apart(make_backend: MakeBackend, rng: np.random.Generator) -> None:
    case = Case(rng, shape_of(4, 2, 64), [(1, 200)])
    case.qkv *= 300
    np.testing.assert_allclose(case.run(make_backend(kv_cache_dtype="float32")), case.expected(), rtol=0, atol=2e-3)
