"""Kernel cards: what the compiler and the executor say of every kernel, and whether that is what we ask of it.

From ``ptxas -v``: registers, spills, stack, shared memory, and the occupancy they allow. From the PTX: float64, local
memory, calls. From the executor, on slices of a Llama-3-8B layer: how well loads coalesce, shared-memory bank
conflicts, and how often each byte of a weight is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from numba_engine.backends.base import (
    Array,
    AttentionShape,
    Batch,
    KVCacheLayer,
    RopeTable,
    SamplingBatch,
)
from numba_engine.backends.cuda.backend import CudaBackend
from numba_engine.backends.cuda.compiler import CompiledKernel, Kernel, compile_kernel
from numba_engine.backends.cuda.device import Grid
from numba_engine.backends.cuda.kernels.linear import COLUMNS
from numba_engine.backends.cuda.kernels.read_bandwidth import read_bandwidth
from numba_engine.backends.cuda.ptxas import assemble
from numba_engine.backends.ptx import LaunchCounters, PtxDevice
from numba_engine.config import EngineConfig
from numba_engine.storage import StorageFormat, quantize

COMPUTE_CAPABILITIES = ((8, 0), (8, 9), (9, 0), (10, 0))

_WEIGHT = "weight"
_BY_DATA = {"penalties": "sectors", "sample": "bank conflicts"}
"""The data decide: penalties touch single logits wherever the history's tokens are, and the bins of the sampler's
histogram are where the logits lie."""


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """What one multiprocessor holds at most (CUDA C++ Programming Guide, technical specifications)."""

    threads: int
    blocks: int
    shared_bytes: int
    registers: int = 65536


MULTIPROCESSORS = {
    (8, 0): Multiprocessor(threads=2048, blocks=32, shared_bytes=164 * 1024),
    (8, 9): Multiprocessor(threads=1536, blocks=24, shared_bytes=100 * 1024),
    (9, 0): Multiprocessor(threads=2048, blocks=32, shared_bytes=228 * 1024),
    (10, 0): Multiprocessor(threads=2048, blocks=32, shared_bytes=228 * 1024),
}


@dataclass(frozen=True, slots=True)
class KernelCard:
    """One kernel for one compute capability. What does not apply is None."""

    kernel: str
    cc: str
    threads: int
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    occupancy: float
    """Warps a multiprocessor can hold of this kernel, over the warps it can hold."""
    f64: int
    """Instructions (and declarations) of each kind in the PTX."""
    local: int
    calls: int
    wide_weight_share: float | None
    """Bytes of weights read in 128-bit accesses, over all."""
    weight_reads: float | None
    """Bytes of weights read over the bytes they are."""
    sector_efficiency: float
    bank_conflict_factor: float

    @property
    def misses(self) -> tuple[str, ...]:
        """The targets this kernel does not reach."""
        reads = self.kernel.startswith("linear")
        checks = (
            ("spills", self.spill_bytes == 0),
            ("stack", self.stack_bytes == 0),
            ("f64", self.f64 == 0),
            ("local", self.local == 0),
            ("calls", self.calls == 0),
            ("weight loads", not reads or (self.wide_weight_share or 0) >= 0.99),
            ("weight reads", not reads or self.weight_reads == 1),
            ("sectors", self.sector_efficiency >= 0.98),
            ("bank conflicts", self.bank_conflict_factor <= 1.05),
        )
        return tuple(name for name, passed in checks if not passed and _BY_DATA.get(self.kernel) != name)


def kernel_cards(cc: tuple[int, int], kernels: Callable[[str], bool] = lambda name: True) -> list[KernelCard]:
    """Cards of all kernels (or those whose name passes), in the order a forward pass uses them.

    Raises BackendUnavailableError if ptxas is missing.
    """
    device = _NotingDevice(cc, kernels)
    _run_everything(CudaBackend(device, EngineConfig(), name="ptx"))
    return [_card(kernel, cc, device.counters[name]) for name, kernel in device.kernels.items()]


def occupancy(cc: tuple[int, int], threads: int, registers: int, shared_bytes: int) -> float:
    """After the CUDA Occupancy Calculator: registers go to warps in units of 256, warps to four schedulers."""
    limit = MULTIPROCESSORS[cc]
    warps = -(-threads // 32)
    registers_per_warp = -(-registers * 32 // 256) * 256
    by_registers = limit.registers // 4 // registers_per_warp * 4 // warps
    by_shared = limit.shared_bytes // (-(-shared_bytes // 128) * 128 + 1024)  # 1 KiB a block is the system's
    blocks = min(limit.blocks, limit.threads // (32 * warps), by_registers, by_shared)
    return blocks * warps * 32 / limit.threads


def _card(kernel: Kernel, cc: tuple[int, int], launches: Sequence[LaunchCounters]) -> KernelCard:
    compiled = compile_kernel(kernel, cc)
    assembled = assemble(compiled)
    weights = [launch.arrays[_WEIGHT] for launch in launches if _WEIGHT in launch.arrays]
    weight_bytes = sum(array.load.bytes for array in weights)
    wide_bytes = sum(array.load.bytes_by_width.get(16, 0) for array in weights)
    wavefronts = sum(launch.shared_wavefronts for launch in launches)
    ideal_wavefronts = sum(launch.shared_wavefronts_ideal for launch in launches)
    sectors = sum(launch.sectors for launch in launches)
    return KernelCard(
        kernel.name,
        ".".join(map(str, cc)),
        kernel.threads,
        assembled.registers,
        assembled.spill_bytes,
        assembled.stack_bytes,
        assembled.shared_bytes,
        occupancy(cc, kernel.threads, assembled.registers, assembled.shared_bytes),
        **ptx_counts(compiled),
        wide_weight_share=wide_bytes / weight_bytes if weights else None,
        weight_reads=weight_bytes / sum(array.nbytes for array in weights) if weights else None,
        sector_efficiency=sum(launch.sectors_ideal for launch in launches) / sectors if sectors else 1.0,
        bank_conflict_factor=wavefronts / ideal_wavefronts if ideal_wavefronts else 1.0,
    )


def ptx_counts(compiled: CompiledKernel) -> dict[str, int]:
    """What compiled PTX must hold none of."""
    patterns = {"f64": r"\.f64\b", "local": r"\.local\b", "calls": r"^\s*(?:@!?%p\d+\s+)?call\b"}
    return {name: len(re.findall(pattern, compiled.ptx, re.MULTILINE)) for name, pattern in patterns.items()}


class _NotingDevice(PtxDevice):
    """An executor that counts, and notes every kernel it is given."""

    def __init__(self, cc: tuple[int, int], wanted: Callable[[str], bool]) -> None:
        super().__init__(cc, memory_bytes=1 << 28, counting=True)
        self.kernels: dict[str, Kernel] = {}
        self.counters: dict[str, list[LaunchCounters]] = {}
        self._wanted = wanted

    def launch(
        self,
        kernel: Kernel,
        grid: Grid,
        arguments: Sequence[Any],
        *,
        shared_bytes: int = 0,
        cooperative: bool = False,
    ) -> None:
        if not self._wanted(kernel.name):
            return
        super().launch(kernel, grid, arguments, shared_bytes=shared_bytes, cooperative=cooperative)
        self.kernels[kernel.name] = kernel
        self.counters.setdefault(kernel.name, []).append(self.launches.pop())


# ---- slices of a Llama-3-8B layer ------------------------------------------------------------------------------------

_HIDDEN, _INTERMEDIATE, _HEADS, _KV_HEADS, _HEAD_DIM = 4096, 14336, 32, 8, 128
_ROWS, _WIDE_ROWS, _VOCAB, _CONTEXT, _BLOCK_SIZE = 128, 32, 16384, 384, 16


def _run_everything(backend: CudaBackend) -> None:
    rng = np.random.default_rng(0)

    def floats(*shape: int) -> Array:
        return backend.upload(rng.standard_normal(shape, dtype=np.float32))

    def integers(*values: int) -> Array:
        return backend.upload(np.array(values, dtype=np.int32))

    shape = AttentionShape(_HEADS, _KV_HEADS, _HEAD_DIM, 1e-5, None)
    residual, qkv = floats(2, _HIDDEN), floats(2, (_HEADS + 2 * _KV_HEADS) * _HEAD_DIM)
    for format in StorageFormat:
        table = backend.load_weight("table", [quantize("", rng.standard_normal((8, _HIDDEN)), format)])
        backend.embedding(residual, integers(5, 2), table)
    backend.rms_norm(residual, residual, floats(_HIDDEN), 1e-5)
    for format in StorageFormat:
        for rows, columns in ((_ROWS, _HIDDEN), (_WIDE_ROWS, _INTERMEDIATE)):
            weight = backend.load_weight(_WEIGHT, [quantize("", rng.standard_normal((rows, columns)), format)])
            for num_rows in COLUMNS:
                backend.linear_add(floats(num_rows, rows), floats(num_rows, columns), weight)
    backend.head_norm(qkv, floats(_HEAD_DIM), floats(_HEAD_DIM), shape)
    rotation = RopeTable(floats(8, _HEAD_DIM // 2), floats(8, _HEAD_DIM // 2))
    backend.rope(qkv, integers(3, 4), rotation, shape)
    _run_attention(backend, shape, qkv, floats, integers)
    backend.silu_and_mul(floats(2, _INTERMEDIATE), floats(2, 2 * _INTERMEDIATE))
    backend.gather_rows(floats(2, _HIDDEN), residual, integers(1, 0))
    _run_sampling(backend, floats)
    data = backend.upload(np.zeros(1 << 18, np.uint32))
    read_bandwidth(backend.device, data.on_device, blocks=32)


def _run_attention(
    backend: CudaBackend,
    shape: AttentionShape,
    qkv: Array,
    floats: Callable[..., Array],
    integers: Callable[..., Array],
) -> None:
    """A step of decode for two sequences, in both cache types."""
    blocks = _CONTEXT // _BLOCK_SIZE
    batch = Batch(
        token_ids=integers(1, 2),
        positions=integers(_CONTEXT - 1, _CONTEXT - 1),
        slot_mapping=integers(_CONTEXT - 1, 2 * _CONTEXT - 1),
        cu_seqlens_q=integers(0, 1, 2),
        context_lens=integers(_CONTEXT, _CONTEXT),
        block_tables=backend.upload(np.arange(2 * blocks, dtype=np.int32).reshape(2, blocks)),
        logit_rows=integers(0, 1),
        num_tokens=2,
        num_seqs=2,
        num_logits=2,
        max_query_len=1,
        max_context_len=_CONTEXT,
    )
    for dtype in (np.float16, np.float32):
        size = (2 * blocks, shape.num_kv_heads, _BLOCK_SIZE, shape.head_dim)
        cache = KVCacheLayer(*(backend.upload(np.ones(size, dtype)) for _ in range(2)))
        backend.store_kv(cache, qkv, batch.slot_mapping, shape)
        backend.attention(floats(2, shape.num_heads * shape.head_dim), qkv, cache, batch, shape)


def _run_sampling(backend: CudaBackend, floats: Callable[..., Array]) -> None:
    """Every filter and penalty, and log-probabilities."""

    def one(value: float, dtype: type[np.generic]) -> Array:
        return backend.upload(np.array([value], dtype))

    history = np.arange(0, 64 * 97, 97, dtype=np.int32)
    sampling = SamplingBatch(
        temperature=one(0.8, np.float32),
        top_k=one(50, np.int32),
        top_p=one(0.9, np.float32),
        min_p=one(0.01, np.float32),
        repetition_penalty=one(1.1, np.float32),
        presence_penalty=one(0.1, np.float32),
        frequency_penalty=one(0.1, np.float32),
        seed=one(7, np.uint64),
        output_index=one(3, np.uint32),
        history_offsets=backend.upload(np.array([0, history.size], np.int32)),
        history=backend.upload(history),
        history_prompt_lens=one(32, np.int32),
        bias_offsets=backend.upload(np.array([0, 1], np.int32)),
        bias_token_ids=one(11, np.int32),
        bias_values=one(0.5, np.float32),
        num_logits=1,
        num_top_logprobs=2,
    )
    backend.sample(floats(1, _VOCAB), sampling)
