"""GB/s of every GPU kernel on the shapes of a model's layer, beside the read bandwidth measured in the same run.

python -m perf.bench_kernels [--out FILE] [--dry-run]

Weights rotate over copies larger than any cache, so that each launch reads them from memory. Times are the GPU's own,
between two events around many launches. ``--dry-run`` runs small shapes on the PTX executor: it shows that the script
works, and its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from numba_engine.backends.base import (
    Array,
    AttentionShape,
    Batch,
    KVCacheLayer,
    RopeTable,
    SamplingBatch,
    Weight,
    WeightSegment,
)
from numba_engine.backends.cuda.backend import CudaBackend
from numba_engine.backends.cuda.kernels.packing import LAYOUTS, num_stripes, num_units
from numba_engine.config import EngineConfig
from numba_engine.storage import StorageFormat
from perf.machine import describe


@dataclass(frozen=True, slots=True)
class Shape:
    """A layer, and how much of everything is run."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    contexts: tuple[int, ...]
    rotating_bytes: int
    """Copies of each weight make up this much, to be larger than the last cache."""
    repeats: int


LLAMA_3_8B = Shape(4096, 14336, 32, 8, 128, 128256, (512, 8192), 512 << 20, 30)
TINY = Shape(256, 512, 4, 2, 64, 1024, (300,), 1 << 16, 1)


@dataclass(frozen=True, slots=True)
class Result:
    op: str
    case: str
    time_us: float
    bytes: int
    gbps: float
    share: float
    """Of the read bandwidth measured in this run."""


@dataclass(frozen=True, slots=True)
class Case:
    op: str
    case: str
    calls: list[Callable[[], None]]
    """Equal work on other copies of the data; run in turn."""
    nbytes: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="Write the results here as JSON.")
    parser.add_argument("--dry-run", action="store_true", help="Small shapes on the PTX executor.")
    options = parser.parse_args()
    backend, shape = make_backend(options.dry_run), TINY if options.dry_run else LLAMA_3_8B
    read_gbps = backend.read_bandwidth_gbps()
    if not options.dry_run:
        print(f"{backend.device_name}: plain read {read_gbps:.0f} GB/s")
    results = []
    for case in _cases(backend, shape):
        seconds = _seconds_per_call(backend, case.calls, shape.repeats)
        gbps = case.nbytes / seconds / 1e9
        results.append(Result(case.op, case.case, seconds * 1e6, case.nbytes, gbps, gbps / read_gbps))
        measured = f"{seconds * 1e6:9.1f} µs {gbps:8.1f} GB/s {gbps / read_gbps:6.1%}"
        print(f"{case.op:14} {case.case:28} {'ran' if options.dry_run else measured}")
    if options.out:
        gpu = {"name": backend.device_name, "read_bandwidth_gbps": read_gbps, "dry_run": options.dry_run}
        report = describe() | {"gpu": gpu, "kernels": [asdict(result) for result in results]}
        options.out.write_text(json.dumps(report, indent=1) + "\n")


def make_backend(dry_run: bool) -> CudaBackend:
    config = EngineConfig(kv_cache_dtype="float16")
    if dry_run:
        from numba_engine.backends.ptx import PtxDevice

        return CudaBackend(PtxDevice(), config, name="ptx")
    from numba_engine.backends.cuda.availability import require_gpu
    from numba_engine.backends.cuda.cuda_device import CudaDevice

    require_gpu()
    return CudaBackend(CudaDevice(), config, name="cuda")


def _seconds_per_call(backend: CudaBackend, calls: list[Callable[[], None]], repeats: int) -> float:
    """The best of three rounds, by events on the device's stream where it has them."""
    calls[0]()
    stream = getattr(backend.device, "stream", None)
    best = float("inf")
    for _ in range(3 if stream is not None else 1):
        if stream is None:
            start = time.perf_counter()
            for i in range(repeats):
                calls[i % len(calls)]()
            backend.device.synchronize()
            elapsed = time.perf_counter() - start
        else:
            import cupy

            first, last = cupy.cuda.Event(), cupy.cuda.Event()
            first.record(stream)
            for i in range(repeats):
                calls[i % len(calls)]()
            last.record(stream)
            last.synchronize()
            elapsed = cupy.cuda.get_elapsed_time(first, last) / 1e3
        best = min(best, elapsed / repeats)
    return best


def _cases(backend: CudaBackend, shape: Shape) -> Iterator[Case]:
    rng = np.random.default_rng(0)

    def floats(*size: int) -> Array:
        return backend.upload(rng.standard_normal(size, dtype=np.float32))

    qkv_rows = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    matrices = {
        "qkv": (qkv_rows, shape.hidden),
        "o": (shape.hidden, shape.heads * shape.head_dim),
        "gate_up": (2 * shape.intermediate, shape.hidden),
        "down": (shape.hidden, shape.intermediate),
    }
    for format in StorageFormat:
        for name, (rows, columns) in matrices.items():
            weights = list(_copies(backend, rng, format, rows, columns, shape.rotating_bytes))
            for num_rows in (1, 4, 8, 64):
                x, out = floats(num_rows, columns), floats(num_rows, rows)
                calls = [_bound(backend.linear, out, x, weight) for weight in weights]
                yield Case("linear", f"{format.label} {name} × {num_rows}", calls, weights[0].nbytes)
    yield from _attention_cases(backend, shape, floats)
    yield from _small_cases(backend, shape, floats)


def _bound(op: Callable[..., None], *arguments: object) -> Callable[[], None]:
    return lambda: op(*arguments)


def random_weight(
    backend: CudaBackend, rng: np.random.Generator, format: StorageFormat, rows: int, columns: int
) -> Weight:
    """Random bits (finite in every float format), as packed as a checkpoint's would be."""
    bits = _random_bits(rng, format, rows, columns)
    return Weight("w", (rows, columns), (WeightSegment(format, rows, bits.nbytes, backend.upload(bits)),))


def _copies(
    backend: CudaBackend, rng: np.random.Generator, format: StorageFormat, rows: int, columns: int, total_bytes: int
) -> Iterator[Weight]:
    bits = _random_bits(rng, format, rows, columns)
    for _ in range(max(1, total_bytes // bits.nbytes)):
        yield Weight("w", (rows, columns), (WeightSegment(format, rows, bits.nbytes, backend.upload(bits)),))


def _random_bits(rng: np.random.Generator, format: StorageFormat, rows: int, columns: int) -> np.ndarray:
    num_words = num_stripes(rows) * num_units(format, columns) * LAYOUTS[format].loads * 4
    period = rng.integers(0, 2**32, min(num_words, 1 << 22), dtype=np.uint32) & np.uint32(0x3BFF3BFF)
    return np.resize(period, num_words)


def _attention_cases(backend: CudaBackend, shape: Shape, floats: Callable[..., Array]) -> Iterator[Case]:
    attention = AttentionShape(shape.heads, shape.kv_heads, shape.head_dim, 1e-5, None)
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    for context in shape.contexts:
        for num_seqs in (1, 8):
            blocks = -(-context // 16)
            size = (num_seqs * blocks, shape.kv_heads, 16, shape.head_dim)
            caches = [KVCacheLayer(*(backend.upload(np.ones(size, np.float16)) for _ in "kv")) for _ in range(2)]
            batch = decode_batch(backend, num_seqs, context, blocks)
            qkv, out = floats(num_seqs, width), floats(num_seqs, shape.heads * shape.head_dim)
            calls = [_bound(backend.attention, out, qkv, cache, batch, attention) for cache in caches]
            nbytes = 2 * num_seqs * context * shape.kv_heads * shape.head_dim * 2
            yield Case("attention", f"decode {num_seqs} × {context}", calls, nbytes)


def decode_batch(backend: CudaBackend, num_seqs: int, context: int, blocks: int) -> Batch:
    def column(value: int) -> Array:
        return backend.upload(np.full(num_seqs, value, np.int32))

    return Batch(
        token_ids=column(0),
        positions=column(context - 1),
        slot_mapping=column(context - 1),
        cu_seqlens_q=backend.upload(np.arange(num_seqs + 1, dtype=np.int32)),
        context_lens=column(context),
        block_tables=backend.upload(np.arange(num_seqs * blocks, dtype=np.int32).reshape(num_seqs, blocks)),
        logit_rows=backend.upload(np.arange(num_seqs, dtype=np.int32)),
        num_tokens=num_seqs,
        num_seqs=num_seqs,
        num_logits=num_seqs,
        max_query_len=1,
        max_context_len=context,
    )


def _small_cases(backend: CudaBackend, shape: Shape, floats: Callable[..., Array]) -> Iterator[Case]:
    """Too small for bandwidth: what counts is the time."""
    attention = AttentionShape(shape.heads, shape.kv_heads, shape.head_dim, 1e-5, None)
    x, weight = floats(1, shape.hidden), floats(shape.hidden)
    yield Case("rms_norm", "1 row", [_bound(backend.rms_norm, x, x, weight, 1e-5)], 3 * x.nbytes)
    gate_up, mlp = floats(1, 2 * shape.intermediate), floats(1, shape.intermediate)
    yield Case("silu_and_mul", "1 row", [_bound(backend.silu_and_mul, mlp, gate_up)], 3 * mlp.nbytes)
    qkv = floats(1, (shape.heads + 2 * shape.kv_heads) * shape.head_dim)
    table = RopeTable(floats(64, shape.head_dim // 2), floats(64, shape.head_dim // 2))
    position = backend.upload(np.array([3], np.int32))
    yield Case("rope", "1 row", [_bound(backend.rope, qkv, position, table, attention)], 2 * qkv.nbytes)
    norms = floats(shape.head_dim), floats(shape.head_dim)
    yield Case("head_norm", "1 row", [_bound(backend.head_norm, qkv, *norms, attention)], 2 * qkv.nbytes)
    size = (4, shape.kv_heads, 16, shape.head_dim)
    cache = KVCacheLayer(*(backend.upload(np.ones(size, np.float16)) for _ in "kv"))
    yield Case("store_kv", "1 row", [_bound(backend.store_kv, cache, qkv, position, attention)], qkv.nbytes)
    out = floats(1, shape.hidden)
    yield Case(
        "gather_rows",
        "1 row",
        [_bound(backend.gather_rows, out, x, backend.upload(np.zeros(1, np.int32)))],
        2 * x.nbytes,
    )
    (embedding_table,) = _copies(
        backend, np.random.default_rng(0), StorageFormat.BF16, shape.vocab // 8, shape.hidden, 1
    )
    yield Case("embedding", "1 row", [_bound(backend.embedding, out, position, embedding_table)], out.nbytes)
    logits = floats(1, shape.vocab)
    for name, parameters in {"greedy": (0.0, 0, 1.0), "top-k top-p": (0.8, 40, 0.9)}.items():
        # Waits for the token each time, as the engine does.
        yield Case(
            "sample", name, [_bound(backend.sample, logits, sampling_batch(backend, 1, *parameters))], logits.nbytes
        )


def sampling_batch(
    backend: CudaBackend, num_rows: int, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0
) -> SamplingBatch:
    def column(value: float, dtype: type[np.generic]) -> Array:
        return backend.upload(np.full(num_rows, value, dtype))

    none = backend.upload(np.empty(0, np.int32))
    offsets = backend.upload(np.zeros(num_rows + 1, np.int32))
    return SamplingBatch(
        temperature=column(temperature, np.float32),
        top_k=column(top_k, np.int32),
        top_p=column(top_p, np.float32),
        min_p=column(0, np.float32),
        repetition_penalty=column(1, np.float32),
        presence_penalty=column(0, np.float32),
        frequency_penalty=column(0, np.float32),
        seed=column(1, np.uint64),
        output_index=column(0, np.uint32),
        history_offsets=offsets,
        history=none,
        history_prompt_lens=column(0, np.int32),
        bias_offsets=offsets,
        bias_token_ids=none,
        bias_values=backend.upload(np.empty(0, np.float32)),
        num_logits=num_rows,
        num_top_logprobs=-1,
    )


if __name__ == "__main__":
    main()
