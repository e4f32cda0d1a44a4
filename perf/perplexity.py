"""Perplexity of the demo model, numba_engine against llama.cpp on the same file. Needs the ``perf`` extra.

    python -m perf.perplexity --formats Q4_1 --activation-dtypes int8 float32

As ``llama-perplexity`` does it: the text is cut into windows of 512 tokens and the second half of each is scored, so
that every token has at least 256 before it. The text is the Constitution of the United States (public domain).
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from numba_engine import LLM, EngineConfig
from perf import machine
from perf.llama_cpp_model import LlamaCppModel
from perf.make_formats import FORMATS, model_file
from tests.golden.forward import Forward, log_softmax

TEXT = Path(__file__).parent / "data" / "us_constitution.txt"
WINDOW = 512
SCORED = range(WINDOW // 2, WINDOW)
"""Positions in a window whose tokens are scored, each from the logits of the one before."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["Q4_1"])
    parser.add_argument("--activation-dtypes", nargs="+", choices=("int8", "float32"), default=["int8", "float32"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--windows", type=int, default=None, help="score only the first so many")
    parser.add_argument("--name", default="perplexity", help="the result's file name in perf/results")
    arguments = parser.parse_args()
    rows = []
    for label in arguments.formats:
        file = model_file(label)
        windows = tokenized(file)[: arguments.windows]
        theirs = perplexity(llama_cpp_logits(file, arguments.threads), windows)
        for dtype in arguments.activation_dtypes:
            ours = perplexity(numba_engine_logits(file, arguments.threads, dtype), windows)
            row = {"format": label, "activation_dtype": dtype, "numba_engine": ours, "llama_cpp": theirs}
            rows.append(row | {"ratio": ours["perplexity"] / theirs["perplexity"]})
    file = Path(__file__).parent / "results" / f"{arguments.name}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(machine.describe() | {"text": TEXT.name, "rows": rows}, indent=1) + "\n")
    Console(width=120).print(ratio_table(rows))
    print(file)


def tokenized(file: Path) -> list[list[int]]:
    """Whole windows of the text's tokens."""
    llm = LLM(str(file), EngineConfig(backend="cpu", max_num_seqs=1, max_model_len=32))
    token_ids = llm.tokenize(TEXT.read_text(encoding="utf-8"))
    return [token_ids[i : i + WINDOW] for i in range(0, len(token_ids) - WINDOW + 1, WINDOW)]


def perplexity(logits: Callable[[Sequence[int]], np.ndarray], windows: Sequence[Sequence[int]]) -> dict[str, Any]:
    """exp of the mean negative log-likelihood of the scored tokens, and its standard error."""
    losses = []
    for window in windows:
        logprobs = log_softmax(logits(window))
        losses += [-logprobs[row, window[position]] for row, position in enumerate(SCORED)]
    mean = float(np.mean(losses))
    error = math.exp(mean) * float(np.std(losses)) / math.sqrt(len(losses))
    return {"perplexity": math.exp(mean), "standard_error": error, "num_tokens": len(losses)}


def numba_engine_logits(file: Path, num_threads: int, activation_dtype: Any) -> Callable[[Sequence[int]], np.ndarray]:
    config = EngineConfig(backend="cpu", num_threads=num_threads, activation_dtype=activation_dtype)
    forward = Forward.load(file, config, max_tokens=WINDOW)
    return lambda window: forward.logits(window, [position - 1 for position in SCORED])


def llama_cpp_logits(file: Path, num_threads: int) -> Callable[[Sequence[int]], np.ndarray]:
    model = LlamaCppModel(file, num_threads=num_threads, context_len=WINDOW, all_logits=True)

    def logits(window: Sequence[int]) -> np.ndarray:
        model.forget()
        model.decode([(token, i, 0, i + 1 in SCORED) for i, token in enumerate(window)])
        return np.stack([model.logits(position - 1) for position in SCORED])

    return logits


def ratio_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="perplexity (lower is better)")
    for header in ("format", "activations", "numba_engine", "llama.cpp", "ratio"):
        table.add_column(header, justify="right")
    for row in rows:
        ours, theirs = (_with_error(row[engine]) for engine in ("numba_engine", "llama_cpp"))
        table.add_row(row["format"], row["activation_dtype"], ours, theirs, f"{row['ratio']:.4f}")
    return table


def _with_error(result: dict[str, Any]) -> str:
    return f"{result['perplexity']:.3f} ± {result['standard_error']:.3f}"


if __name__ == "__main__":
    main()
