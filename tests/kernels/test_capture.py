"""Ops captured on the CPU: replayed, they give what they would give now; memory they use stays where it was."""

from __future__ import annotations

import numpy as np
import pytest

from numba_engine.backends.arrays import Batch, KVCacheLayer, Norm
from numba_engine.backends.cpu import commands
from numba_engine.backends.cpu.backend import CpuBackend
from numba_engine.backends.layers import Attention
from numba_engine.config import EngineConfig
from numba_engine.formats import Q4_1, Q8_0, quantize
from tests.kernels.test_attention import Case


@pytest.fixture
def own_backend() -> CpuBackend:
    """With no memory that an earlier test made it take."""
    return CpuBackend(EngineConfig(num_threads=2))


def test_nothing_runs_while_it_is_captured_and_replays_see_what_the_arrays_hold_then(
    own_backend: CpuBackend, rng: np.random.Generator
) -> None:
    weight = own_backend.load_weight("w", [quantize("w", rng.standard_normal((48, 64), dtype=np.float32), Q4_1)])
    norm = Norm(rng.standard_normal(64).astype(np.float32), 1e-5)
    x, normed, out = (np.zeros((3, n), np.float32) for n in (64, 64, 48))
    with own_backend.capture() as graph:
        own_backend.rms_norm(normed, x, norm)
        own_backend.linear(out, normed, weight)
    assert graph.num_launches == 2
    x[:] = rng.standard_normal(x.shape)
    assert not normed.any()
    for _ in range(2):
        x[:] += 1
        expected_normed, expected = np.empty_like(normed), np.empty_like(out)
        own_backend.rms_norm(expected_normed, x, norm)
        own_backend.linear(expected, expected_normed, weight)
        graph.replay()
        assert np.array_equal(normed, expected_normed)
        assert np.array_equal(out, expected)


def test_scratch_of_a_graph_outlives_larger_steps(own_backend: CpuBackend, rng: np.random.Generator) -> None:
    """A long prompt takes more room for its integers; the graph still has its own."""
    weight = own_backend.load_weight("w", [quantize("w", rng.standard_normal((48, 64), dtype=np.float32), Q8_0)])
    x = rng.standard_normal((2, 64), dtype=np.float32)
    out, expected = (np.empty((2, 48), np.float32) for _ in range(2))
    own_backend.linear(expected, x, weight)
    with own_backend.capture() as graph:
        own_backend.linear(out, x, weight)
    before = own_backend.prepared(2, 64).ctypes.data
    long = rng.standard_normal((500, 64), dtype=np.float32)
    own_backend.linear(np.empty((500, 48), np.float32), long, weight)
    assert own_backend.prepared(2, 64).ctypes.data != before
    taken = [np.full(1 << 14, 255, np.uint8) for _ in range(100)]  # what was freed would be among these
    graph.replay()
    assert np.array_equal(out, expected)
    assert all((memory == 255).all() for memory in taken)


def test_an_error_ends_the_capture(own_backend: CpuBackend, rng: np.random.Generator) -> None:
    x, norm = rng.standard_normal((1, 32), dtype=np.float32), Norm(np.ones(32, np.float32), 1e-5)
    out = np.zeros_like(x)
    with pytest.raises(ValueError, match="no"), own_backend.capture():
        raise ValueError("no")
    own_backend.rms_norm(out, x, norm)
    assert out.any()


def test_a_graph_is_one_call(
    own_backend: CpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, ...]] = []
    run = commands.run_calls
    monkeypatch.setattr(commands, "run_calls", lambda *args: (calls.append(args), run(*args)))
    x, norm = rng.standard_normal((1, 32), dtype=np.float32), Norm(np.ones(32, np.float32), 1e-5)
    expected = x.copy()
    for _ in range(7):
        own_backend.rms_norm(expected, expected, norm)
    with own_backend.capture() as graph:
        for _ in range(7):
            own_backend.rms_norm(x, x, norm)
    assert not calls
    graph.replay()
    assert np.array_equal(x, expected)
    assert len(calls) == 1


def test_how_long_contexts_are_is_read_when_a_graph_runs(own_backend: CpuBackend, rng: np.random.Generator) -> None:
    """Captured with a short context, which one thread would not share; replayed with long ones, in chunks."""
    case = Case(rng, Attention(6, 2, 32, 32**-0.5), [(1, 700), (1, 3)])
    expected = case.run(own_backend)
    out = np.full_like(expected, np.nan)
    lens = np.array([1, 1], np.int32)
    with own_backend.capture() as graph:
        own_backend.attention(out, case.qkv, case.cache, batch_of(case, lens, max_context_len=1), case.shape)
    lens[:] = case.context_lens
    graph.replay()
    assert np.array_equal(out, expected)


def batch_of(case: Case, context_lens: np.ndarray, *, max_context_len: int) -> Batch:
    nothing = np.empty(0, np.int32)
    return Batch(
        token_ids=nothing,
        positions=nothing,
        slot_mapping=nothing,
        cu_seqlens_q=case.cu_seqlens,
        context_lens=context_lens,
        block_tables=case.tables,
        logit_rows=nothing,
        num_tokens=len(case.qkv),
        num_seqs=len(context_lens),
        num_logits=0,
        max_query_len=1,
        max_context_len=max_context_len,
    )


def test_padding_is_neither_stored_nor_attended(own_backend: CpuBackend, rng: np.random.Generator) -> None:
    """Rows behind the last sequence's have slot -1 and no context."""
    case = Case(rng, Attention(6, 2, 32, 32**-0.5), [(1, 40), (1, 3)])
    expected = case.run(own_backend)
    case.cu_seqlens = np.array([0, 1, 2, 2, 2], np.int32)
    case.qkv = np.concatenate([case.qkv, np.full_like(case.qkv, 7)])
    case.tables = np.concatenate([case.tables, np.zeros_like(case.tables)])
    out = np.full((4, expected.shape[1]), -5, np.float32)
    lens = np.concatenate([case.context_lens, [0, 0]]).astype(np.int32)
    own_backend.attention(out, case.qkv, case.cache, batch_of(case, lens, max_context_len=40), case.shape)
    assert np.array_equal(out[:2], expected)
    assert (out[2:] == -5).all()

    cache = KVCacheLayer(*(np.zeros((3, 2, 16, 32), np.float32) for _ in "kv"))
    own_backend.store_kv(cache, case.qkv, np.array([20, 3, -1, -1], np.int32), case.shape)
    stored = [(block, offset) for block in range(3) for offset in range(16) if cache.k[block, :, offset].any()]
    assert stored == [(0, 3), (1, 4)]
    assert not (cache.v == 7).any()
