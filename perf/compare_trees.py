"""Decode and prompt speed of two checkouts, in turn: what a change of the code costs.

    python -m perf.compare_trees ../before . --models a.gguf b.gguf [--rounds 4] [--threads 2] [--json FILE]

Each measurement is a process of its own with that checkout's package. The ratios are after / before: of the smallest
times, and the median over the pairs of neighbouring processes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

PROMPT_TOKENS, DECODE_STEPS, REPETITIONS = 512, 96, 3
VOCAB = 40_000  # ids that every model here has


def measure(model: str, threads: int) -> tuple[float, float]:
    """(ms of a decode step, ms of a prompt): the median of a run's steps, one prompt, the best of the repetitions."""
    from numba_engine import LLM, EngineConfig, SamplingParams

    llm = LLM(model, EngineConfig(backend="cpu", num_threads=threads, max_model_len=2048, max_num_seqs=4))
    ids, steps, prompts = random.Random(0), [], []

    def tokens(count: int) -> list[int]:
        return [ids.randrange(100, VOCAB) for _ in range(count)]

    def params(count: int) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)

    llm.generate([tokens(16)], params(DECODE_STEPS))  # compiles, captures
    for repetition in range(REPETITIONS):
        prompt, start = tokens(PROMPT_TOKENS), time.perf_counter()
        llm.generate([prompt], params(1))
        prompts.append(time.perf_counter() - start)
        llm.add_request(str(repetition), tokens(16), params(DECODE_STEPS + 1))
        llm.step()
        times = []
        while llm.has_unfinished:
            start = time.perf_counter()
            llm.step()
            times.append(time.perf_counter() - start)
        steps.append(median(times))
    return 1e3 * min(steps), 1e3 * min(prompts)


def measured_in(tree: Path, model: str, threads: int) -> tuple[float, float]:
    environment = {**os.environ, "PYTHONPATH": str(tree.resolve())}
    command = [sys.executable, str(Path(__file__).resolve()), "--one", model, "--threads", str(threads)]
    run = subprocess.run(command, env=environment, cwd=tree, capture_output=True, text=True, check=True)
    decode_ms, prompt_ms = json.loads(run.stdout)
    return decode_ms, prompt_ms


def compared(before: Path, after: Path, model: str, rounds: int, threads: int) -> dict[str, Any]:
    pairs = []
    for i in range(rounds):
        order = (before, after) if i % 2 == 0 else (after, before)
        times = {tree: measured_in(tree, model, threads) for tree in order}
        pairs.append((times[before], times[after]))
    result: dict[str, Any] = {"model": Path(model).name}
    for k, name in enumerate(("decode_ms", "prompt_512_ms")):
        old, new = [pair[0][k] for pair in pairs], [pair[1][k] for pair in pairs]
        ratios = [b / a for a, b in zip(old, new, strict=True)]
        result[name] = {
            "before": round(min(old), 3),
            "after": round(min(new), 3),
            "ratio": round(min(new) / min(old), 3),
            "median_ratio": round(median(ratios), 3),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", type=Path, metavar="TREE", help="the checkouts: before, after")
    parser.add_argument("--models", nargs="+", metavar="FILE")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.threads)))
        return
    if len(options.trees) != 2 or not options.models:
        parser.error("two checkouts and --models are needed")
    from perf.machine import describe

    before, after = options.trees

    commits = [
        subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=tree, capture_output=True, text=True).stdout.strip()
        for tree in options.trees
    ]
    record: dict[str, Any] = {**describe(), "commits": commits, "threads": options.threads, "results": []}
    for model in options.models:
        record["results"].append(compared(before, after, model, options.rounds, options.threads))
        print(json.dumps(record["results"][-1]), flush=True)
        if options.json:
            options.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
