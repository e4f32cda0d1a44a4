"""Tokens a second of whole decode steps, and their share of the bandwidth that a plain read reaches in the same run.

python -m perf.bench_decode [--model 8b] [--format BF16] [--out FILE] [--minutes 3] [--dry-run]

Models with random weights made on the device, run as the engine runs them: ``ModelRunner`` launches a step, and with
replayed steps the next one before the tokens of the last are seen. Greedy. Times are the host's, from token to token,
medians. The floor is weights and KV once, at the speed of the plain read. What matters most is measured first.
``--dry-run`` runs a tiny model on the PTX executor: it shows that the script works, and its times mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median

import numpy as np

from numba_engine.backends.cuda.backend import CudaBackend
from numba_engine.config import EngineConfig
from numba_engine.execution.kv_cache import allocate_kv_cache
from numba_engine.execution.model_runner import ModelRunner
from numba_engine.formats import BF16, FORMATS, Q4_0, Q8_0
from numba_engine.model.config import ModelConfig
from numba_engine.model.decoder import Decoder
from numba_engine.model.rope import build_rope_tables
from numba_engine.model.weights import ModelWeights
from numba_engine.sampling_params import SamplingParams
from numba_engine.scheduling.scheduler import ScheduledSequence, ScheduledStep
from numba_engine.scheduling.sequence import Sequence
from perf.gpu_time import Deadline, Report, plain_read_gbps
from perf.random_model import CONFIGS, clear, make_backend, random_model, streamed_bytes

BLOCK_SIZE = 16
TIMED = {format.name: format for format in (BF16, Q8_0, Q4_0)}
SWITCHES = ((True, True), (False, True), (True, False), (False, False))
"""(fusion, graph): as shipped first."""


@dataclass(frozen=True, slots=True)
class Workload:
    num_seqs: int
    context: int
    """Tokens each sequence sees in the first timed step."""
    steps: int

    @property
    def blocks_per_seq(self) -> int:
        return -(-(self.context + 2 * self.steps + 8) // BLOCK_SIZE)


@dataclass(frozen=True, slots=True)
class Result:
    model: str
    format: str
    num_seqs: int
    context: int
    fusion: bool
    graph: bool
    step_ms: float
    tokens_per_s: float
    floor_ms: float
    share_of_read: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("8b", "1b"), action="append", help="Llama shapes; default both.")
    parser.add_argument("--format", choices=tuple(FORMATS), action="append", help=f"Default {', '.join(TIMED)}.")
    parser.add_argument("--out", type=Path, help="Write the results here as JSON, after each one.")
    parser.add_argument("--minutes", type=float, default=60, help="Start nothing after this long.")
    parser.add_argument("--dry-run", action="store_true", help="A tiny model on the PTX executor.")
    options = parser.parse_args()
    deadline = Deadline(60 * options.minutes)
    backend = make_backend(options.dry_run)
    read_gbps = plain_read_gbps(backend, 1 << 20 if options.dry_run else 1 << 30)
    print(f"{backend.device_name}: plain read {'ran' if options.dry_run else f'{read_gbps:.0f} GB/s'}")
    gpu = {"name": backend.device_name, "read_gbps": read_gbps}
    report = Report(options.out, gpu=gpu, dry_run=options.dry_run)
    models = ("tiny",) if options.dry_run else tuple(options.model or ("8b", "1b"))
    formats = options.format or (["Q4_0"] if options.dry_run else list(TIMED))
    for model, format in product(models, formats):
        if not deadline.allows(f"{model} {format}"):
            continue
        gc.collect()
        weights = random_model(backend, CONFIGS[model], FORMATS[format])
        for fusion, graph, workload in _cases(options.dry_run):
            name = f"{model} {format} {workload.num_seqs} × {workload.context} fusion={fusion} graph={graph}"
            if not deadline.allows(name):
                continue
            seconds = step_seconds(backend, CONFIGS[model], weights, workload, fusion=fusion, graph=graph)
            floor_s = floor_bytes(CONFIGS[model], weights, workload) / read_gbps / 1e9
            rate = workload.num_seqs / seconds
            result = Result(
                *(model, format, workload.num_seqs, workload.context, fusion, graph),
                *(seconds * 1e3, rate, floor_s * 1e3, floor_s / seconds),
            )
            report.add(asdict(result))
            measured = f"{seconds * 1e3:8.3f} ms {rate:9.1f} tok/s {result.share_of_read:6.1%} of the plain read"
            print(f"{name:56} {'ran' if options.dry_run else measured}")
        del weights
    if deadline.left_out:
        print(f"no time left for {len(deadline.left_out)}: {', '.join(deadline.left_out)}")


def _cases(dry_run: bool) -> Iterator[tuple[bool, bool, Workload]]:
    """(fusion, graph, workload); everything as shipped first, the switches at one sequence of 128 only."""
    if dry_run:
        yield from ((fusion, graph, Workload(2, 20, 2)) for fusion, graph in SWITCHES)
        return
    for context, num_seqs in product((128, 8192), (1, 8, 64)):
        yield *SWITCHES[0], Workload(num_seqs, context, 30)
    yield from ((fusion, graph, Workload(1, 128, 20)) for fusion, graph in SWITCHES[1:])


def step_seconds(
    backend: CudaBackend, config: ModelConfig, weights: ModelWeights, workload: Workload, *, fusion: bool, graph: bool
) -> float:
    """Median time of a step; the first ones, which compile and record, do not count."""
    engine = EngineConfig(
        block_size=BLOCK_SIZE,
        kv_cache_dtype="float16",
        max_num_seqs=workload.num_seqs,
        max_num_batched_tokens=max(workload.num_seqs, BLOCK_SIZE),
        fusion=fusion,
        graph=graph,
    )
    backend = _with_fusion(backend, fusion)
    blocks = workload.blocks_per_seq
    kv_cache = allocate_kv_cache(config, engine, workload.num_seqs * blocks, backend)
    for layer in kv_cache:
        clear(backend, layer.k)
        clear(backend, layer.v)
    max_len = blocks * BLOCK_SIZE
    decoder = Decoder(weights.with_rope(build_rope_tables(config, max_len, backend)))
    runner = ModelRunner(config, decoder, kv_cache, engine, backend, max_len)
    step = decode_step(workload)
    return _replayed(runner, backend, step, workload) if graph else _launched(runner, backend, step, workload)


def _with_fusion(backend: CudaBackend, fusion: bool) -> CudaBackend:
    """The same device, with its memory and compiled kernels."""
    return CudaBackend(backend.device, EngineConfig(kv_cache_dtype="float16", fusion=fusion), name=backend.name)


def decode_step(workload: Workload) -> ScheduledStep:
    """Sequences that have all but their last token in the cache, and blocks for all steps."""
    step = []
    for number in range(workload.num_seqs):
        params = SamplingParams(temperature=0, max_tokens=2 * workload.steps + 8)
        prompt = [1 + number] * (workload.context - 1)
        sequence = Sequence(str(number), prompt, params, seed=number, arrival_s=0.0)
        sequence.token_ids.append(1)
        sequence.num_computed_tokens = workload.context - 1
        first = number * workload.blocks_per_seq
        sequence.block_table = list(range(first, first + workload.blocks_per_seq))
        step.append(ScheduledSequence.within(sequence, 1))
    return step


def _replayed(runner: ModelRunner, backend: CudaBackend, step: ScheduledStep, workload: Workload) -> float:
    """The host reads tokens one step behind."""
    launched = runner.launch(step, backend)
    for _ in range(3):
        following = runner.launch_again(launched)
        launched.wait()
        launched = following
    times = []
    for _ in range(workload.steps):
        start = time.perf_counter()
        following = runner.launch_again(launched)
        launched.wait()
        times.append(time.perf_counter() - start)
        launched = following
    launched.wait()
    backend.synchronize()
    return median(times)


def _launched(runner: ModelRunner, backend: CudaBackend, step: ScheduledStep, workload: Workload) -> float:
    """Every kernel anew, and every token seen before the next step."""
    times = []
    for _ in range(workload.steps + 2):
        start = time.perf_counter()
        sampled = runner.launch(step, backend).wait()
        times.append(time.perf_counter() - start)
        assert sampled is not None
        for scheduled, token_id in zip(step, np.asarray(sampled.token_ids).tolist(), strict=True):
            scheduled.sequence.token_ids.append(token_id)
            scheduled.sequence.num_computed_tokens += 1
    return median(times[2:])


def floor_bytes(config: ModelConfig, weights: ModelWeights, workload: Workload) -> int:
    """Matrices, and the keys and values of a step in the middle of those timed."""
    tokens = workload.num_seqs * (workload.context + workload.steps // 2)
    return streamed_bytes(weights) + 2 * tokens * config.kv_values_per_token


if __name__ == "__main__":
    main()
