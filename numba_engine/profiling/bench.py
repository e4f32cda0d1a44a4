"""Throughput as ``llama-bench`` defines it: pp (prompt processing) and tg (text generation), and the bytes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import fmean, stdev

from numba_engine.engine.llm import LLM
from numba_engine.engine.validation import ValidRequest
from numba_engine.errors import ConfigError
from numba_engine.profiling.report import StepProfile
from numba_engine.profiling.session import ProfileSession, SessionStep
from numba_engine.profiling.synthetic import random_requests
from numba_engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One line of a bench. Bytes and FLOPs by formula, time measured, mean over the repetitions."""

    name: str
    """pp512, tg128, ``tg128 @ d4096`` at a depth, ``× 8`` in a batch."""
    num_tokens: int
    """Tokens of one repetition, all sequences together."""
    tokens_per_s: float
    tokens_per_s_sd: float
    """Standard deviation over the repetitions; 0 with one."""
    gbps: float
    """Weights and KV moved, over the time taken, GB/s."""
    read_bandwidth_gbps: float
    """Plain read bandwidth of this machine, measured with the same threads."""
    gflops: float

    @property
    def share_of_bandwidth(self) -> float:
        return self.gbps / self.read_bandwidth_gbps if self.read_bandwidth_gbps else 0.0


@dataclass(frozen=True, slots=True)
class _Measured:
    """One repetition; the traffic only where it was profiled."""

    num_tokens: int
    time_s: float
    steps: tuple[StepProfile, ...] = ()


def run_bench(
    session: ProfileSession,
    *,
    prompt_tokens: int = 512,
    gen_tokens: int = 128,
    repetitions: int = 5,
    depth: int = 0,
    batch: int = 1,
) -> list[BenchRow]:
    """Measure ``batch`` sequences at once: a row for prefill, one for decode; 0 tokens leaves a row out.

    pp: prompts of ``prompt_tokens`` random tokens, prefilled from an empty context. tg: ``gen_tokens`` tokens each, one
    a step, onto a context of ``depth`` random tokens, or of a single one. Every repetition has prompts of its own, so
    that no prefix is found in the cache. A first, unmeasured repetition warms up and counts bytes and FLOPs.

    Raises:
        ConfigError: if the engine cannot hold ``batch`` such sequences at once.
    """
    check_fits(session.llm, max(prompt_tokens + 1, max(depth, 1) + gen_tokens + 1), batch)
    suffix = f" × {batch}" if batch > 1 else ""
    rows = []
    if prompt_tokens:
        run = lambda: _prefill(session, prompt_tokens, batch)  # noqa: E731
        rows.append(_row(session, f"pp{prompt_tokens}{suffix}", repetitions, run))
    if gen_tokens:
        at_depth = f" @ d{depth}" if depth else ""
        run = lambda: _decode(session, gen_tokens, depth, batch)  # noqa: E731
        rows.append(_row(session, f"tg{gen_tokens}{at_depth}{suffix}", repetitions, run))
    return rows


def _row(session: ProfileSession, name: str, repetitions: int, run: Callable[[], _Measured]) -> BenchRow:
    session.start()
    try:
        counted = run()
    finally:
        read_bandwidth_gbps = session.stop().read_bandwidth_gbps
    ops = [op for step in counted.steps for op in step.ops]
    measured = [run() for _ in range(repetitions)]
    rates = [m.num_tokens / m.time_s for m in measured]
    mean_time_s = fmean(m.time_s for m in measured)
    return BenchRow(
        name=name,
        num_tokens=counted.num_tokens,
        tokens_per_s=fmean(rates),
        tokens_per_s_sd=stdev(rates) if repetitions > 1 else 0.0,
        gbps=sum(op.weight_bytes + op.kv_bytes for op in ops) / mean_time_s / 1e9,
        read_bandwidth_gbps=read_bandwidth_gbps,
        gflops=sum(op.flops for op in ops) / mean_time_s / 1e9,
    )


def _prefill(session: ProfileSession, prompt_tokens: int, batch: int) -> _Measured:
    """From the first step to the last sequence's first token."""
    with session.running(_requests(session, prompt_tokens, batch, max_tokens=1)) as steps:
        return _measured(steps, batch * prompt_tokens)


def _decode(session: ProfileSession, gen_tokens: int, depth: int, batch: int) -> _Measured:
    """``gen_tokens`` steps with a token for every sequence; at depth 0 the first of them is from the lone token."""
    with session.running(_requests(session, max(depth, 1), batch, max_tokens=None)) as steps:
        started: set[str] = set()
        while depth and len(started) < batch:
            started |= {output.request_id for output in next(steps).outputs}
        return _measured(itertools.islice(steps, gen_tokens), batch * gen_tokens)


def _measured(steps: Iterable[SessionStep], num_tokens: int) -> _Measured:
    start = time.perf_counter()
    profiles = [step.profile for step in steps]
    time_s = time.perf_counter() - start
    return _Measured(num_tokens, time_s, tuple(profile for profile in profiles if profile))


def _requests(session: ProfileSession, num_tokens: int, batch: int, max_tokens: int | None) -> list[ValidRequest]:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return random_requests(session.llm, [num_tokens] * batch, params)


def check_fits(llm: LLM, context_len: int, batch: int) -> None:
    """Raises ConfigError unless the engine can hold so many sequences of so many tokens at once."""
    info, stats = llm.model_info, llm.stats
    if context_len > info.max_model_len:
        raise ConfigError(f"max_model_len is {info.max_model_len}, but {context_len} tokens are needed")
    if batch > stats.max_num_seqs:
        raise ConfigError(f"max_num_seqs is {stats.max_num_seqs}, but {batch} sequences are to run at once")
    needed = batch * -(-context_len // stats.block_size)
    if needed > stats.num_kv_blocks:
        raise ConfigError(
            f"the KV cache has {stats.num_kv_blocks} blocks, but {needed} are needed: raise num_kv_blocks "
            f"or kv_cache_bytes (to {needed * stats.block_size * info.kv_bytes_per_token})"
        )
