"""numba_engine against llama.cpp: same files, same threads, one run, taking turns. Needs the ``perf`` extra.

    python -m perf.compare_llama_cpp --formats Q4_1
    python -m perf.compare_llama_cpp --tests pp512 tg128 --patience 40 --name compare_formats  # 8 minutes at most

Each engine lives in a process of its own and sleeps while the other works, so that neither disturbs the other's threads
and peak memory is its own. What is timed: for llama.cpp the bare ``llama_decode``, without
sampling or text; for numba_engine the whole ``LLM.step``, scheduling, sampling and text included.

    pp512        a prompt of 512 random tokens from an empty context
    tg128        128 tokens, one a step, from a single token
    tg128@4096   the same after a context of 4096 tokens
    tg128x8      the same for 8 sequences at once, tokens of all of them together
    load         from the path to the first token, compiled kernels in the cache
    memory       peak resident set of the process after the tests of a single sequence

Decoding waits for memory, so its rows also say what share numba_engine gets of the read bandwidth, which a third
process measures with as many threads in between: the weights of the model and the mean context, once a token.

Wants a machine with nothing else to do: threads that wait for each other suffer out of proportion when another process
takes a core. So a repetition counts only if other processes took less than 5 % of the cores meanwhile; where patience
runs out before there are enough of those, the row says how many there were, and counts the others if there were none.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from perf import machine
from perf.make_formats import FORMATS, model_file

DEPTH = 4096
CONTEXT_LEN = {1: DEPTH + 256, 8: 512}  # tokens a sequence, by the number of sequences
VOCAB_SIZE = 49152
MAX_SHARE_OF_OTHERS = 0.05


@dataclass(frozen=True, slots=True)
class Test:
    """One line of the comparison."""

    name: str
    prompt_tokens: int = 0
    gen_tokens: int = 0
    depth: int = 0
    batch: int = 1


TESTS = (
    Test("pp512", prompt_tokens=512),
    Test("tg128", gen_tokens=128),
    Test("tg128@4096", gen_tokens=128, depth=DEPTH),
    Test("tg128x8", gen_tokens=128, batch=8),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--tests", nargs="+", choices=[test.name for test in TESTS], default=[t.name for t in TESTS])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--patience", type=float, default=120.0, help="seconds a test may wait for a quiet machine")
    parser.add_argument("--name", default="compare_llama_cpp", help="the result's file name in perf/results")
    arguments = parser.parse_args()
    tests = [test for test in TESTS if test.name in arguments.tests]
    result: dict[str, Any] = machine.describe() | {"threads": arguments.threads, "repetitions": arguments.repetitions}
    result["rows"] = []
    turns = Turns(arguments.repetitions, arguments.patience)
    file = Path(__file__).parent / "results" / f"{arguments.name}.json"
    file.parent.mkdir(exist_ok=True)
    for label in arguments.formats:
        for row in compare(label, tests, turns, arguments.threads):
            result["rows"].append(row)
            file.write_text(json.dumps(result, indent=1) + "\n")
    Console(width=120).print(ratio_table(result["rows"]))
    print(file)


def compare(label: str, tests: list[Test], turns: Turns, num_threads: int) -> Iterator[dict[str, Any]]:
    """Rows of one format; ``ratio`` above 1 means that numba_engine is better."""
    for batch in sorted({test.batch for test in tests}):
        engines = [EngineProcess(kind, model_file(label), num_threads, batch) for kind in (NumbaEngine, LlamaCpp)]
        memory = EngineProcess(ReadBandwidth, model_file(label), num_threads, batch)
        try:
            load_s = [Rates([engine.ask("load")]) for engine in engines]
            for test in (test for test in tests if test.batch == batch):
                reader = memory if test.gen_tokens and batch == 1 else None
                ours, theirs, gbps = turns.take(engines, test, reader)
                row = _row(label, test.name, "tok/s", ours, theirs, more_is_better=True)
                if reader:
                    streamed = median(ours.counted) * engines[0].ask("bytes_per_token", test) / 1e9
                    row |= {"gbps": streamed, "read_bandwidth_gbps": gbps, "share": streamed / median(gbps)}
                yield row
            peaks_mb = [Rates([engine.ask("peak_memory_mb")]) for engine in engines]
        finally:
            for process in (*engines, memory):
                process.close()
        if batch == 1:
            yield _row(label, "load", "s", *load_s, more_is_better=False)
            yield _row(label, "memory", "MB", *peaks_mb, more_is_better=False)


@dataclass(frozen=True, slots=True)
class Rates:
    """Repetitions of one test on one engine: those that nothing disturbed, and the others."""

    undisturbed: list[float]
    disturbed: list[float] = field(default_factory=list)

    @property
    def counted(self) -> list[float]:
        return self.undisturbed or self.disturbed


@dataclass(frozen=True, slots=True)
class Turns:
    """How long the engines take turns at a test."""

    repetitions: int
    patience_s: float

    def take(
        self, engines: list[EngineProcess], test: Test, memory: EngineProcess | None
    ) -> tuple[Rates, Rates, list[float]]:
        """Rates of both engines, after one repetition to warm up, and of reading memory, GB/s."""
        gbps = []
        for engine in engines:
            engine.ask("run", test)
        rates = [Rates([]) for _ in engines]
        end = time.monotonic() + self.patience_s
        while any(len(own.undisturbed) < self.repetitions for own in rates):
            for engine, own in zip(engines, rates, strict=True):
                _wait_for_quiet(end)
                with engine.watched() as others:
                    rate = engine.ask("run", test)
                (own.undisturbed if others.share < MAX_SHARE_OF_OTHERS else own.disturbed).append(rate)
            if memory:
                gbps.append(memory.ask("gbps"))
            if time.monotonic() > end:
                break
        ours, theirs = rates
        return ours, theirs, gbps


def _wait_for_quiet(end: float) -> None:
    while psutil.cpu_percent(interval=0.2) > 100 * MAX_SHARE_OF_OTHERS and time.monotonic() < end:
        pass


def _row(label: str, test: str, unit: str, ours: Rates, theirs: Rates, *, more_is_better: bool) -> dict[str, Any]:
    def column(rates: Rates) -> dict[str, Any]:
        return {"median": median(rates.counted), "undisturbed": rates.undisturbed, "disturbed": rates.disturbed}

    ratio = median(ours.counted) / median(theirs.counted)
    return {
        "format": label,
        "test": test,
        "unit": unit,
        "numba_engine": column(ours),
        "llama_cpp": column(theirs),
        "ratio": ratio if more_is_better else 1 / ratio,
    }


def ratio_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="numba_engine against llama.cpp (a ratio above 1 is better than llama.cpp)")
    for header in ("format", "test", "unit"):
        table.add_column(header)
    for header in ("numba_engine", "llama.cpp", "ratio", "of bandwidth", "undisturbed"):
        table.add_column(header, justify="right")
    for row in rows:
        ours, theirs = row["numba_engine"], row["llama_cpp"]
        numbers = (f"{number:.2f}" for number in (ours["median"], theirs["median"], row["ratio"]))
        counts = f"{len(ours['undisturbed'])} and {len(theirs['undisturbed'])}"
        share = f"{row['share']:.0%} of {median(row['read_bandwidth_gbps']):.0f} GB/s" if "share" in row else ""
        table.add_row(row["format"], row["test"], row["unit"], *numbers, share, counts)
    return table


# ---- the engines, each in its process ------------------------------------------------------------------------------


class Engine(ABC):
    """What both are asked for."""

    def __init__(self, file: Path, num_threads: int, max_seqs: int) -> None:
        self.file = file
        self.num_threads = num_threads
        self.max_seqs = max_seqs
        self.context_len = CONTEXT_LEN[max_seqs]

    def run(self, test: Test) -> float:
        """Tokens per second of one repetition."""
        if test.prompt_tokens:
            return test.prompt_tokens / self.prefill_s(_random_tokens(test.prompt_tokens))
        return test.batch * test.gen_tokens / self.decode_s(test)

    def peak_memory_mb(self) -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6

    @abstractmethod
    def load(self) -> float:
        """Load, and give the seconds to the first token."""

    @abstractmethod
    def prefill_s(self, prompt: list[int]) -> float: ...

    @abstractmethod
    def decode_s(self, test: Test) -> float: ...


class NumbaEngine(Engine):
    """Through the public API; every step is timed whole."""

    def load(self) -> float:
        from numba_engine import LLM, EngineConfig, SamplingParams

        start = time.perf_counter()
        self.llm = LLM(
            str(self.file),
            EngineConfig(
                backend="cpu",
                num_threads=self.num_threads,
                max_num_seqs=self.max_seqs,
                max_model_len=self.context_len,
            ),
        )
        self.llm.generate([[1]], SamplingParams(temperature=0.0, max_tokens=1))
        return time.perf_counter() - start

    def bytes_per_token(self, test: Test) -> float:
        info = self.llm.model_info
        return info.weight_bytes + info.kv_bytes_per_token * (test.depth + test.gen_tokens / 2)

    def prefill_s(self, prompt: list[int]) -> float:
        self._add("prompt", prompt, max_tokens=1)
        start = time.perf_counter()
        while self.llm.has_unfinished:
            self.llm.step()
        return time.perf_counter() - start

    def decode_s(self, test: Test) -> float:
        names = [f"sequence {i}" for i in range(test.batch)]
        for i, name in enumerate(names):
            # The same deep context each time: the prefix cache then spares its prefill, which is not timed.
            self._add(name, _deep_context(test.depth) if test.depth else [i + 1], max_tokens=None)
        unstarted = set(names) if test.depth else set()
        while unstarted:
            unstarted -= {output.request_id for output in self.llm.step()}
        start = time.perf_counter()
        for _ in range(test.gen_tokens):
            self.llm.step()
        time_s = time.perf_counter() - start
        for name in names:
            self.llm.abort(name)
        return time_s

    def _add(self, name: str, prompt: list[int], *, max_tokens: int | None) -> None:
        from numba_engine import SamplingParams

        self.llm.add_request(name, prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))


class LlamaCpp(Engine):
    """Through the C API; only its forward passes are timed."""

    def load(self) -> float:
        from perf.llama_cpp_model import LlamaCppModel

        start = time.perf_counter()
        self.model = LlamaCppModel(
            self.file, num_threads=self.num_threads, context_len=self.context_len, max_seqs=self.max_seqs
        )
        self.model.prefill([1])
        self.depth = 0
        return time.perf_counter() - start

    def prefill_s(self, prompt: list[int]) -> float:
        self.model.forget()
        self.depth = 0
        start = time.perf_counter()
        self.model.prefill(prompt)
        return time.perf_counter() - start

    def decode_s(self, test: Test) -> float:
        if test.depth and self.depth != test.depth:
            self.model.forget()
            self.model.prefill(_deep_context(test.depth))
        self.depth = test.depth
        self.model.forget(from_position=test.depth)
        tokens = _random_tokens(test.gen_tokens)
        start = time.perf_counter()
        for i, token in enumerate(tokens):
            self.model.decode([(token, test.depth + i, sequence, True) for sequence in range(test.batch)])
        return time.perf_counter() - start


class ReadBandwidth:
    """Nothing but memory being read."""

    def __init__(self, file: Path, num_threads: int, max_seqs: int) -> None:
        from numba_engine.backends.cpu.backend import CpuBackend
        from numba_engine.config import EngineConfig

        self.backend = CpuBackend(EngineConfig(backend="cpu", num_threads=num_threads))

    def gbps(self) -> float:
        return self.backend.read_bandwidth_gbps()


class EngineProcess:
    """An engine in a process of its own, which sleeps unless it is asked something."""

    def __init__(self, kind: type[Engine | ReadBandwidth], file: Path, num_threads: int, max_seqs: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(kind, file, num_threads, max_seqs, other), daemon=True)
        self._process.start()
        other.close()

    def ask(self, method: str, *arguments: Any) -> float:
        self._pipe.send((method, arguments))
        answer = self._pipe.recv()
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return float(answer)

    @contextmanager
    def watched(self) -> Iterator[Others]:
        """Afterwards, its value says how much of the cores other processes took meanwhile."""
        others = Others()
        own = psutil.Process(self._process.pid)
        start, all_before, own_before = time.monotonic(), _busy_s(psutil.cpu_times()), _busy_s(own.cpu_times())
        yield others
        taken_s = (_busy_s(psutil.cpu_times()) - all_before) - (_busy_s(own.cpu_times()) - own_before)
        others.share = taken_s / (time.monotonic() - start) / len(os.sched_getaffinity(0))

    def close(self) -> None:
        self._pipe.close()
        self._process.join()


@dataclass(slots=True)
class Others:
    """Share of all cores' time that went to processes other than the one measured."""

    share: float = 0.0


def _busy_s(times: Any) -> float:
    """CPU seconds that were neither idle nor spent waiting."""
    kinds = ("user", "system", "nice", "irq", "softirq", "steal")
    return float(sum(getattr(times, kind, 0.0) for kind in kinds))


def _serve(kind: type[Engine | ReadBandwidth], file: Path, num_threads: int, max_seqs: int, pipe: Connection) -> None:
    engine = kind(file, num_threads, max_seqs)
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer: float | str = getattr(engine, method)(*arguments)
        except Exception as error:
            answer = f"{kind.__name__}.{method}: {type(error).__name__}: {error}"
        pipe.send(answer)


def _random_tokens(count: int) -> list[int]:
    return random.choices(range(VOCAB_SIZE), k=count)


def _deep_context(depth: int) -> list[int]:
    return random.Random(depth).choices(range(VOCAB_SIZE), k=depth)


if __name__ == "__main__":
    main()
