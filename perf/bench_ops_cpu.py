"""GB/s of each phase of one forward on the CPU backend, against the read bandwidth measured in the same run.

    python perf/bench_ops_cpu.py [--format Q4_1] [--tokens 1] [--context 128] [--threads N] [--rounds 20]

The model has random weights in SmolLM2-135M's shapes, all layers of them, so that weights come from memory and not from
cache. Times are the fastest and the median of all layers and rounds.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from numba_engine.backends.arrays import Batch, KVCacheLayer, Norm, RopeTable, Weight
from numba_engine.backends.cpu.backend import CpuBackend
from numba_engine.backends.layers import Attention, GatedMlp, Layer
from numba_engine.config import EngineConfig
from numba_engine.formats import FORMATS, Q8_0, Format, StoredTensor
from perf.random_rows import random_rows

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 576, 1536, 30, 9, 3, 64, 49152
BLOCK_SIZE = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    fitting = [name for name, format in FORMATS.items() if HIDDEN % format.block_size == 0]
    parser.add_argument("--format", choices=fitting, default="Q4_1")
    parser.add_argument("--tokens", type=int, default=1, help="tokens in the step (a chunk of one sequence)")
    parser.add_argument("--sequences", type=int, default=1, help="sequences of one token each, instead of a chunk")
    parser.add_argument("--context", type=int, default=128, help="tokens in the cache, new ones included")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--activation-dtype", choices=["int8", "float32"], default="int8")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()

    backend = CpuBackend(EngineConfig(num_threads=options.threads, activation_dtype=options.activation_dtype))
    format = FORMATS[options.format]
    rng = np.random.default_rng(0)
    layers = [random_layer(backend, rng, format) for _ in range(LAYERS)]
    head = random_weight(backend, rng, Q8_0 if format.is_quantized else format, VOCAB, HIDDEN)
    queries = [1] * options.sequences if options.sequences > 1 else [options.tokens]
    step = Step(backend, rng, queries, max(options.context, max(queries)))

    times: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, op: Callable[[], object]) -> None:
        start = time.perf_counter()
        op()
        times[name].append(time.perf_counter() - start)

    for _ in range(options.rounds + 1):
        for layer, cache in zip(layers, step.caches, strict=True):
            step.layer(timed, layer, cache)
        timed("norm_lm_head", lambda: step.head(layers[0], head))
    bandwidth = backend.read_bandwidth_gbps()

    kv_bytes = sum(step.batch.context_lens) * KV_HEADS * HEAD_DIM * 2 * backend.kv_cache_dtype.itemsize
    moved = {
        "norm_qkv_rope_store": layers[0].qkv_proj.nbytes,
        "attention": kv_bytes,
        "o_proj": layers[0].o_proj.nbytes,
        "norm_gate_up_act": layers[0].mlp.gate_up_proj.nbytes,
        "down_proj": layers[0].mlp.down_proj.nbytes,
        "norm_lm_head": head.nbytes,
    }
    print(f"{backend.device_name}; {options.format}; read bandwidth {bandwidth:.1f} GB/s")
    print(f"{'phase':22}{'calls':>6}{'KB':>9}{'best us':>9}{'median us':>11}{'best GB/s':>11}{'share':>7}{'MAC/ns':>8}")
    best_total = median_total = 0.0
    rows = sum(queries)
    for name, nbytes in moved.items():
        calls = 1 if name == "norm_lm_head" else LAYERS
        samples = times[name][calls:]  # without the first round, which compiles
        best, median = min(samples), float(np.median(samples))
        best_total += calls * best
        median_total += calls * median
        gbps = nbytes / best / 1e9
        rate = macs(name, rows) / best / 1e9
        print(
            f"{name:22}{calls:6}{nbytes / 1e3:9.0f}{best * 1e6:9.1f}{median * 1e6:11.1f}{gbps:11.1f}"
            f"{gbps / bandwidth:7.0%}{rate:8.0f}"
        )
    print(
        f"all phases: {best_total * 1e3:.2f} ms at best ({rows / best_total:.0f} tok/s), "
        f"{median_total * 1e3:.2f} ms by medians ({rows / median_total:.0f} tok/s)"
    )


class Step:
    """The arrays of one forward."""

    def __init__(self, backend: CpuBackend, rng: np.random.Generator, queries: list[int], context: int) -> None:
        self.backend = backend
        self.shape = Attention(HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5)
        rows, seqs = sum(queries), len(queries)
        blocks = -(-context // BLOCK_SIZE)
        size = (seqs * blocks, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        self.caches = [
            KVCacheLayer(*(rng.standard_normal(size, dtype=np.float32).astype(backend.kv_cache_dtype) for _ in "kv"))
            for _ in range(LAYERS)
        ]
        tables = np.arange(seqs * blocks, dtype=np.int32).reshape(seqs, blocks)
        positions = np.concatenate([np.arange(context - q, context) for q in queries]).astype(np.int32)
        owner = np.repeat(np.arange(seqs), queries)
        slots = tables[owner, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        self.batch = Batch(
            token_ids=np.zeros(rows, dtype=np.int32),
            positions=positions,
            slot_mapping=slots.astype(np.int32),
            cu_seqlens_q=np.concatenate([[0], np.cumsum(queries)]).astype(np.int32),
            context_lens=np.full(seqs, context, dtype=np.int32),
            block_tables=tables,
            logit_rows=(np.cumsum(queries) - 1).astype(np.int32),
            num_tokens=rows,
            num_seqs=seqs,
            num_logits=seqs,
            max_query_len=max(queries),
            max_context_len=context,
        )
        angles = rng.uniform(0, 6, (context, HEAD_DIM // 2)).astype(np.float32)
        self.shape = replace(self.shape, rope=RopeTable(np.cos(angles), np.sin(angles)))
        self.residual = rng.standard_normal((rows, HIDDEN), dtype=np.float32)
        self.normed = np.empty_like(self.residual)
        self.attn_out = np.empty_like(self.residual)
        self.qkv = np.empty((rows, (HEADS + 2 * KV_HEADS) * HEAD_DIM), dtype=np.float32)
        self.gate_up = np.empty((rows, 2 * INTERMEDIATE), dtype=np.float32)
        self.mlp_out = np.empty((rows, INTERMEDIATE), dtype=np.float32)
        self.last = np.empty((seqs, HIDDEN), dtype=np.float32)
        self.logits = np.empty((seqs, VOCAB), dtype=np.float32)

    def layer(self, timed: Callable[[str, Callable[[], object]], None], layer: Layer, cache: KVCacheLayer) -> None:
        ops, batch, shape = self.backend, self.batch, self.shape
        timed(
            "norm_qkv_rope_store",
            lambda: ops.norm_qkv_rope_store(
                self.qkv, self.normed, self.residual, replace(layer, attention=shape), cache, batch
            ),
        )
        timed("attention", lambda: ops.attention(self.attn_out, self.qkv, cache, batch, shape))
        timed("o_proj", lambda: ops.linear_add(self.residual, self.attn_out, layer.o_proj))
        timed(
            "norm_gate_up_act",
            lambda: ops.norm_gate_up_act(self.mlp_out, self.gate_up, self.normed, self.residual, layer.mlp),
        )
        timed("down_proj", lambda: ops.linear_add(self.residual, self.mlp_out, layer.mlp.down_proj))

    def head(self, layer: Layer, head: Weight) -> None:
        self.backend.norm_lm_head(self.logits, self.last, self.residual, self.batch.logit_rows, layer.attn_norm, head)


def macs(phase: str, rows: int) -> float:
    sizes = {
        "norm_qkv_rope_store": (HEADS + 2 * KV_HEADS) * HEAD_DIM * HIDDEN,
        "o_proj": HIDDEN * HIDDEN,
        "norm_gate_up_act": 2 * INTERMEDIATE * HIDDEN,
        "down_proj": INTERMEDIATE * HIDDEN,
    }
    return sizes.get(phase, 0) * rows


def random_layer(backend: CpuBackend, rng: np.random.Generator, format: Format) -> Layer:
    def weight(rows: int, columns: int) -> Weight:
        return random_weight(backend, rng, format, rows, columns)

    ones = Norm(np.ones(HIDDEN, dtype=np.float32), 1e-5)
    return Layer(
        attention=Attention(HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5),
        attn_norm=ones,
        qkv_proj=weight((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
        qkv_bias=None,
        q_norm=None,
        k_norm=None,
        o_proj=weight(HIDDEN, HIDDEN),
        mlp=GatedMlp(ones, weight(2 * INTERMEDIATE, HIDDEN), "silu", weight(HIDDEN, INTERMEDIATE)),
    )


def random_weight(backend: CpuBackend, rng: np.random.Generator, format: Format, rows: int, columns: int) -> Weight:
    tensor = StoredTensor("random", format, (rows, columns), random_rows(rng, format, rows, columns))
    return backend.load_weight("random", [tensor])


if __name__ == "__main__":
    main()
