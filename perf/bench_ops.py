"""GB/s or TFLOPS of every op on the shapes of a model's layer, beside a plain read and cuBLAS in the same run.

python -m perf.bench_ops [--model 8b] [--model 1b] [--out FILE] [--minutes 3] [--dry-run]

Each op's launches are captured once and replayed, and timed by the GPU: the host is not in the times, which are
medians. Weights rotate over copies larger than any cache, so that each call reads them from memory. The plain read is
the limit: what it reaches of the datasheet's bandwidth no op will exceed. cuBLAS multiplies the same shapes in bf16
(PyTorch) or fp16 (CuPy), whichever is installed. ``--dry-run`` runs small shapes on the PTX executor (and PyTorch on
the CPU): it shows that the script works, and its times mean nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from numba_engine.backends.arrays import Array, Batch, KVCacheLayer, Norm, RopeTable, Weight
from numba_engine.backends.cuda.backend import CudaBackend
from numba_engine.backends.layers import GatedMlp, Layer
from numba_engine.backends.sampling import Sampled, Sampling
from numba_engine.execution.sampling import build_sampling
from numba_engine.formats import BF16, F16, Q4_0, Q4_1, Q8_0, Format
from numba_engine.model.config import ModelConfig
from numba_engine.model.tensors import layer_tensors
from numba_engine.sampling_params import SamplingParams
from numba_engine.scheduling.sequence import Sequence
from perf.gpu_time import Deadline, Report, plain_read_gbps, seconds_of
from perf.random_model import CONFIGS, clear, copied_weight, make_backend, random_weight

BLOCK_SIZE = 16
FORMATS = (BF16, Q8_0, Q4_0, Q4_1, F16)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything is run."""

    rows: tuple[int, ...]
    prompts: tuple[int, ...]
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    rotating_bytes: int
    """Copies of each weight make up this much."""
    read_bytes: int
    calls: int
    """Of small ops, in one replay."""


FULL = Sizes((1, 2, 4, 8, 16, 64), (128, 512, 2048), (128, 8192), (1, 8, 64), 256 << 20, 1 << 30, 20)
TINY = Sizes((1, 3), (9,), (40,), (1, 2), 1 << 17, 1 << 20, 2)


@dataclass(frozen=True, slots=True)
class Case:
    op: str
    case: str
    calls: list[Callable[[], None]]
    """Equal work on other copies of the data."""
    nbytes: int
    """That memory must move."""
    flops: float = 0.0


@dataclass(frozen=True, slots=True)
class Result:
    model: str
    op: str
    case: str
    time_us: float
    gbps: float
    share_of_read: float
    """Of the plain read of this run."""
    tflops: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("8b", "1b"), action="append", help="Llama shapes; default both.")
    parser.add_argument("--out", type=Path, help="Write the results here as JSON, after each one.")
    parser.add_argument("--minutes", type=float, default=60, help="Start nothing after this long.")
    parser.add_argument("--dry-run", action="store_true", help="Small shapes on the PTX executor.")
    options = parser.parse_args()
    backend, sizes = make_backend(options.dry_run), TINY if options.dry_run else FULL
    deadline = Deadline(60 * options.minutes)
    read_gbps = plain_read_gbps(backend, sizes.read_bytes)
    shown = "ran" if options.dry_run else f"{read_gbps:.0f} GB/s"
    print(f"{backend.device_name}: plain read {shown}")
    gpu = {"name": backend.device_name, "read_gbps": read_gbps}
    report = Report(options.out, gpu=gpu, dry_run=options.dry_run)
    for model in ("tiny",) if options.dry_run else options.model or ("8b", "1b"):
        for case in _cases(backend, CONFIGS[model], sizes):
            if deadline.allows(f"{model} {case.op} {case.case}"):
                seconds = seconds_of(backend, case.calls)
                _add(report, model, case, seconds, read_gbps, options.dry_run)
        for op, case_name, seconds, nbytes, flops in _cublas(CONFIGS[model], sizes, options.dry_run):
            case = Case(op, case_name, [], nbytes, flops)
            _add(report, model, case, seconds, read_gbps, options.dry_run)
    if deadline.left_out:
        print(f"no time left for {len(deadline.left_out)}: {', '.join(deadline.left_out)}")


def _add(report: Report, model: str, case: Case, seconds: float, read_gbps: float, dry_run: bool) -> None:
    gbps = case.nbytes / seconds / 1e9
    result = Result(model, case.op, case.case, seconds * 1e6, gbps, gbps / read_gbps, case.flops / seconds / 1e12)
    report.add(asdict(result))
    measured = f"{result.time_us:9.1f} µs {gbps:8.1f} GB/s {result.share_of_read:6.1%} {result.tflops:8.2f} TFLOPS"
    print(f"{model:5} {case.op:20} {case.case:28} {'ran' if dry_run else measured}")


# ---- ours ------------------------------------------------------------------------------------------------------------


def _cases(backend: CudaBackend, config: ModelConfig, sizes: Sizes) -> Iterator[Case]:
    """What decides the speed of decode first."""
    rng = np.random.default_rng(0)
    for format in FORMATS:
        yield from _linear_cases(backend, rng, config, sizes, format)
    yield from _attention_cases(backend, config, sizes)
    yield from _phase_cases(backend, rng, config, sizes)
    yield from _small_cases(backend, rng, config, sizes)


def _matrices(config: ModelConfig) -> dict[str, tuple[int, int]]:
    tensors = layer_tensors(config, 0)
    names = {"qkv": "qkv_proj", "o": "o_proj", "gate_up": "gate_up_proj", "down": "down_proj"}
    return {name: (tensors[full].shape[0], tensors[full].shape[1]) for name, full in names.items()}


def _linear_cases(
    backend: CudaBackend, rng: np.random.Generator, config: ModelConfig, sizes: Sizes, format: Format
) -> Iterator[Case]:
    for name, (rows, columns) in _matrices(config).items():
        weights = _copies(backend, random_weight(backend, rng, format, rows, columns), sizes.rotating_bytes)
        prompts = sizes.prompts if format in (BF16, Q4_0) else ()
        for num_rows in (*sizes.rows, *prompts):
            x, out = _floats(backend, num_rows, columns), _floats(backend, num_rows, rows)
            calls = [partial(backend.linear, out, x, weight) for weight in weights]
            nbytes = weights[0].nbytes + x.nbytes + out.nbytes
            yield Case("linear", f"{format.name} {name} × {num_rows}", calls, nbytes, 2.0 * num_rows * rows * columns)


def _copies(backend: CudaBackend, weight: Weight, total_bytes: int) -> list[Weight]:
    return [weight, *(copied_weight(backend, weight) for _ in range(min(total_bytes // weight.nbytes, 32)))]


def _attention_cases(backend: CudaBackend, config: ModelConfig, sizes: Sizes) -> Iterator[Case]:
    shape = config.layers[0].attention
    width, kv_width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim, shape.num_kv_heads * shape.head_dim
    decodes = [(num_seqs, 1, context) for context in sizes.contexts for num_seqs in sizes.batches]
    for num_seqs, query_len, context in (*decodes, *((1, length, length) for length in sizes.prompts)):
        batch, blocks = _batch(backend, num_seqs, query_len, context), -(-context // BLOCK_SIZE)
        caches = [_cache(backend, config, num_seqs * blocks) for _ in range(2)]
        tokens = num_seqs * query_len
        qkv, out = _floats(backend, tokens, width), _floats(backend, tokens, shape.num_heads * shape.head_dim)
        calls = [partial(backend.attention, out, qkv, cache, batch, shape) for cache in caches]
        pairs = num_seqs * (context if query_len == 1 else context * (context + 1) / 2)
        flops = 4.0 * shape.num_heads * shape.head_dim * pairs
        what = "decode" if query_len == 1 else "prefill"
        yield Case("attention", f"{what} {num_seqs} × {context}", calls, 4 * num_seqs * context * kv_width, flops)


def _phase_cases(backend: CudaBackend, rng: np.random.Generator, config: ModelConfig, sizes: Sizes) -> Iterator[Case]:
    """As the decoder calls them, one token."""
    context = sizes.contexts[0]
    shape = replace(config.layers[0].attention, rope=_rope_table(backend, config, context))
    for format in (BF16, Q8_0, Q4_0):
        layer = replace(_layer(backend, rng, config, format), attention=shape)
        qkv_weights = _copies(backend, layer.qkv_proj, sizes.rotating_bytes)
        gate_up_weights = _copies(backend, layer.mlp.gate_up_proj, sizes.rotating_bytes)
        qkv = _floats(backend, 1, (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim)
        residual, normed = _floats(backend, 1, config.hidden_size), _floats(backend, 1, config.hidden_size)
        gate_up, mlp = (_floats(backend, 1, n * config.layers[0].intermediate_size) for n in (2, 1))
        batch, cache = _batch(backend, 1, 1, context), _cache(backend, config, -(-context // BLOCK_SIZE))
        calls = [
            partial(
                backend.norm_qkv_rope_store,
                qkv,
                normed,
                residual,
                replace(layer, qkv_proj=w),
                cache,
                batch,
            )
            for w in qkv_weights
        ]
        yield Case("norm_qkv_rope_store", f"{format.name} 1 row", calls, layer.qkv_proj.nbytes)
        calls = [
            partial(backend.norm_gate_up_act, mlp, gate_up, normed, residual, replace(layer.mlp, gate_up_proj=w))
            for w in gate_up_weights
        ]
        yield Case("norm_gate_up_act", f"{format.name} 1 row", calls, layer.mlp.gate_up_proj.nbytes)
        head = random_weight(backend, rng, format, config.vocab_size, config.hidden_size)
        last, logits, rows = _floats(backend, 1, config.hidden_size), _floats(backend, 1, config.vocab_size), batch
        call = partial(backend.norm_lm_head, logits, last, residual, rows.logit_rows, layer.attn_norm, head)
        yield Case("norm_lm_head", f"{format.name} 1 row", [call], head.nbytes)


def _layer(backend: CudaBackend, rng: np.random.Generator, config: ModelConfig, format: Format) -> Layer:
    weights = {name: random_weight(backend, rng, format, *size) for name, size in _matrices(config).items()}
    norm = Norm(backend.upload(np.ones(config.hidden_size, np.float32)), config.rms_norm_eps)
    mlp = GatedMlp(norm, weights["gate_up"], "silu", weights["down"])
    return Layer(config.layers[0].attention, norm, weights["qkv"], None, None, None, weights["o"], mlp)


def _small_cases(backend: CudaBackend, rng: np.random.Generator, config: ModelConfig, sizes: Sizes) -> Iterator[Case]:
    """Too small for bandwidth: what counts is the time."""
    shape = replace(config.layers[0].attention, rope=_rope_table(backend, config, 64))
    x, norm = _floats(backend, 1, config.hidden_size), Norm(_floats(backend, config.hidden_size), 1e-5)
    gate_up, mlp = (_floats(backend, 1, n * config.layers[0].intermediate_size) for n in (2, 1))
    qkv = _floats(backend, 1, (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim)
    head_norm = Norm(_floats(backend, shape.head_dim), 1e-5)
    position, row = backend.upload(np.array([3], np.int32)), backend.upload(np.zeros(1, np.int32))
    cache = _cache(backend, config, 4)
    embeddings = random_weight(backend, rng, BF16, 1024, config.hidden_size)
    ops = {
        "rms_norm": (partial(backend.rms_norm, x, x, norm), 3 * x.nbytes),
        "gated_activation": (partial(backend.gated_activation, mlp, gate_up, "silu"), 3 * mlp.nbytes),
        "rope": (partial(backend.rope, qkv, position, shape), 2 * qkv.nbytes),
        "head_norm": (partial(backend.head_norm, qkv, head_norm, head_norm, shape), 2 * qkv.nbytes),
        "store_kv": (partial(backend.store_kv, cache, qkv, position, shape), qkv.nbytes),
        "gather_rows": (partial(backend.gather_rows, x, x, row), 2 * x.nbytes),
        "embedding": (partial(backend.embedding, x, position, embeddings, 1.0), x.nbytes),
    }
    for name, (call, nbytes) in ops.items():
        yield Case(name, "1 row", [call] * sizes.calls, nbytes)
    logits = _floats(backend, 1, config.vocab_size)
    for name, parameters in {"greedy": (0.0, 0, 1.0), "top-k top-p": (0.8, 40, 0.9)}.items():
        sampled = Sampled(backend.empty((1,), np.dtype(np.int32)))
        call = partial(backend.sample, sampled, logits, _sampling(backend, *parameters))
        yield Case("sample", name, [call] * sizes.calls, logits.nbytes)


# ---- cuBLAS ----------------------------------------------------------------------------------------------------------


def _cublas(config: ModelConfig, sizes: Sizes, dry_run: bool) -> Iterator[tuple[str, str, float, int, float]]:
    """(op, case, seconds, bytes, FLOPs) of the same products by the vendor's library."""
    multiply = _torch_multiply(dry_run) or (None if dry_run else _cupy_multiply())
    if multiply is None:
        print("cuBLAS: neither torch nor cupy is installed; nothing to compare with")
        return
    name, prepare = multiply
    for matrix, (rows, columns) in _matrices(config).items():
        copies = max(1, min(sizes.rotating_bytes // (2 * rows * columns), 32))
        for num_rows in (*sizes.rows, *sizes.prompts):
            seconds = prepare(rows, columns, num_rows, copies)
            nbytes = 2 * (rows * columns + num_rows * (rows + columns))
            yield name, f"{matrix} × {num_rows}", seconds, nbytes, 2.0 * rows * columns * num_rows


def _torch_multiply(dry_run: bool) -> tuple[str, Callable[[int, int, int, int], float]] | None:
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    if not dry_run and not torch.cuda.is_available():
        return None
    device = "cpu" if dry_run else "cuda"

    def measure(rows: int, columns: int, num_rows: int, copies: int) -> float:
        weights = [torch.randn(rows, columns, device=device, dtype=torch.bfloat16) for _ in range(copies)]
        x = torch.randn(num_rows, columns, device=device, dtype=torch.bfloat16)

        def run() -> None:
            for weight in weights:
                torch.nn.functional.linear(x, weight)

        if dry_run:
            return _host_median(run) / copies
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        times = []
        for _ in range(6):
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            graph.replay()
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last) / 1e3)
        return median(times[1:]) / copies

    return "cuBLAS bf16 (torch)", measure


def _cupy_multiply() -> tuple[str, Callable[[int, int, int, int], float]] | None:
    if importlib.util.find_spec("cupy") is None:
        return None
    import cupy

    def measure(rows: int, columns: int, num_rows: int, copies: int) -> float:
        weights = [cupy.ones((columns, rows), cupy.float16, order="F") for _ in range(copies)]
        x = cupy.ones((num_rows, columns), cupy.float16)
        outs = [cupy.empty((num_rows, rows), cupy.float16) for _ in weights]
        times = []
        for _ in range(6):
            first, last = cupy.cuda.Event(), cupy.cuda.Event()
            first.record()
            for weight, out in zip(weights, outs, strict=True):
                cupy.matmul(x, weight, out=out)
            last.record()
            last.synchronize()
            times.append(cupy.cuda.get_elapsed_time(first, last) / 1e3)
        return float(median(times[1:])) / copies

    return "cuBLAS fp16 (cupy)", measure


def _host_median(run: Callable[[], None]) -> float:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return median(times)


# ---- arrays ----------------------------------------------------------------------------------------------------------


def _floats(backend: CudaBackend, *size: int) -> Array:
    return backend.upload(np.random.default_rng(1).standard_normal(size, dtype=np.float32))


def _cache(backend: CudaBackend, config: ModelConfig, blocks: int) -> KVCacheLayer:
    shape = config.layers[0].attention
    size = (blocks, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
    arrays = [backend.empty(size, backend.kv_cache_dtype) for _ in "kv"]
    for array in arrays:
        clear(backend, array)
    return KVCacheLayer(*arrays)


def _rope_table(backend: CudaBackend, config: ModelConfig, positions: int) -> RopeTable:
    return RopeTable(*(_floats(backend, positions, config.layers[0].attention.head_dim // 2) for _ in range(2)))


def _batch(backend: CudaBackend, num_seqs: int, query_len: int, context: int) -> Batch:
    blocks, num_tokens = -(-context // BLOCK_SIZE), num_seqs * query_len

    def integers(values: Any) -> Array:
        return backend.upload(np.asarray(values, np.int32))

    positions = np.tile(np.arange(context - query_len, context), num_seqs)
    return Batch(
        token_ids=integers(np.zeros(num_tokens)),
        positions=integers(positions),
        slot_mapping=integers(positions + np.repeat(np.arange(num_seqs) * blocks * BLOCK_SIZE, query_len)),
        cu_seqlens_q=integers(np.arange(num_seqs + 1) * query_len),
        context_lens=integers(np.full(num_seqs, context)),
        block_tables=integers(np.arange(num_seqs * blocks).reshape(num_seqs, blocks)),
        logit_rows=integers(np.arange(num_seqs)),
        num_tokens=num_tokens,
        num_seqs=num_seqs,
        num_logits=num_seqs,
        max_query_len=query_len,
        max_context_len=context,
    )


def _sampling(backend: CudaBackend, temperature: float, top_k: int, top_p: float) -> Sampling:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    return build_sampling([Sequence("sampled", [1], params, seed=1, arrival_s=0.0)], backend)


if __name__ == "__main__":
    main()
