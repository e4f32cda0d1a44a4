"""Tokens per second of a model with random weights, from the decoder down: no checkpoint, no text, no scheduler.

python -m perf.random_model [--format BF16] [--out FILE] [--dry-run]

Llama-3-8B's shape by default; ``--dry-run`` runs a tiny one on the PTX executor. Reports decode at several batch sizes,
beside the floor: bytes of weights and KV over the read bandwidth measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from numba_engine.backends.base import LayerWeights, Weight
from numba_engine.backends.cuda.backend import CudaBackend
from numba_engine.config import EngineConfig
from numba_engine.execution.kv_cache import allocate_kv_cache
from numba_engine.model.activations import Activations
from numba_engine.model.config import ModelConfig
from numba_engine.model.decoder import Decoder, attention_shape
from numba_engine.model.rope import build_rope_table
from numba_engine.model.weights import ModelWeights
from numba_engine.storage import StorageFormat
from perf.bench_kernels import decode_batch, make_backend, random_weight, sampling_batch
from perf.machine import describe

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Result:
    num_seqs: int
    context: int
    step_ms: float
    tokens_per_s: float
    floor_ms: float
    share_of_floor: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", default="BF16", choices=[f.label for f in StorageFormat])
    parser.add_argument("--out", type=Path, help="Write the results here as JSON.")
    parser.add_argument("--dry-run", action="store_true", help="A tiny model on the PTX executor.")
    options = parser.parse_args()
    backend = make_backend(options.dry_run)
    config = model_config(options.dry_run)
    batch_sizes, context, steps = ((1, 2), 20, 2) if options.dry_run else ((1, 8, 64), 512, 20)
    read_gbps = backend.read_bandwidth_gbps()
    weights = random_weights(backend, config, StorageFormat[options.format])
    results = [run(backend, config, weights, n, context, steps, read_gbps) for n in batch_sizes]
    for result in results:
        print("ran" if options.dry_run else asdict(result))
    if options.out:
        gpu = {"name": backend.device_name, "read_bandwidth_gbps": read_gbps, "dry_run": options.dry_run}
        report = describe() | {"gpu": gpu, "format": options.format, "decode": [asdict(result) for result in results]}
        options.out.write_text(json.dumps(report, indent=1) + "\n")


def model_config(tiny: bool) -> ModelConfig:
    hidden, intermediate, layers, heads, kv_heads, head_dim, vocab = (
        (256, 512, 2, 4, 2, 64, 1024) if tiny else (4096, 14336, 32, 32, 8, 128, 128256)
    )
    return ModelConfig(
        architecture="llama",
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        max_position=8192,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=None,
        sliding_window=None,
        has_qkv_bias=False,
        has_qk_norm=False,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_ids=(),
    )


def random_weights(backend: CudaBackend, config: ModelConfig, format: StorageFormat) -> ModelWeights:
    rng = np.random.default_rng(0)
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    norm = backend.upload(np.ones(config.hidden_size, np.float32))

    def matrix(rows: int, columns: int) -> Weight:
        return random_weight(backend, rng, format, rows, columns)

    layers = tuple(
        LayerWeights(
            input_norm=norm,
            qkv_proj=matrix(q_size + 2 * kv_size, config.hidden_size),
            qkv_bias=None,
            q_norm=None,
            k_norm=None,
            o_proj=matrix(config.hidden_size, q_size),
            post_attention_norm=norm,
            gate_up_proj=matrix(2 * config.intermediate_size, config.hidden_size),
            down_proj=matrix(config.hidden_size, config.intermediate_size),
        )
        for _ in range(config.num_layers)
    )
    return ModelWeights(
        embed_tokens=matrix(config.vocab_size, config.hidden_size),
        layers=layers,
        final_norm=norm,
        lm_head=matrix(config.vocab_size, config.hidden_size),
    )


def run(
    backend: CudaBackend,
    config: ModelConfig,
    weights: ModelWeights,
    num_seqs: int,
    context: int,
    steps: int,
    read_gbps: float,
) -> Result:
    """``steps`` decode steps of ``num_seqs`` sequences at one context, each with its draw on the device."""
    blocks = -(-context // BLOCK_SIZE)
    kv_cache = allocate_kv_cache(config, EngineConfig(block_size=BLOCK_SIZE), num_seqs * blocks, backend)
    decoder = Decoder(weights, build_rope_table(config, context + 1, backend), attention_shape(config))
    activations = Activations.allocate(config, num_seqs, num_seqs, backend)
    batch, sampling = decode_batch(backend, num_seqs, context, blocks), sampling_batch(backend, num_seqs)

    def step() -> None:
        decoder.forward(backend, batch, kv_cache, activations)
        backend.sample(activations.logits, sampling)

    step()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    seconds = (time.perf_counter() - start) / steps
    streamed = [weights.lm_head, *(w for layer in weights.layers for w in _matrices(layer))]
    kv_bytes = 2 * num_seqs * context * config.num_layers * config.num_kv_heads * config.head_dim * 2
    floor_s = (sum(weight.nbytes for weight in streamed) + kv_bytes) / read_gbps / 1e9
    return Result(num_seqs, context, seconds * 1e3, num_seqs / seconds, floor_s * 1e3, floor_s / seconds)


def _matrices(layer: LayerWeights) -> tuple[Weight, ...]:
    return layer.qkv_proj, layer.o_proj, layer.gate_up_proj, layer.down_proj


if __name__ == "__main__":
    main()
