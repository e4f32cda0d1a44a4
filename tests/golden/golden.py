"""The reference answers for SmolLM2-135M-Instruct: what they are, and how they are kept.

``smollm2.json`` holds prompts, token ids and greedy tokens; ``smollm2.npz`` the log-probabilities. Both are written by
``make_golden.py`` with torch and transformers and read without them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent
NUM_GREEDY_TOKENS = 24


@dataclass(frozen=True, slots=True, eq=False)
class Golden:
    """What the reference says to one prompt."""

    name: str
    prompt: str | list[dict[str, str]]
    """Text, or the messages of a chat."""
    prompt_token_ids: list[int]
    greedy_token_ids: list[int]
    """24 of them, going on past end tokens."""
    margins: list[float]
    """Log-probability of each greedy token less that of the second best."""
    logprobs: np.ndarray  # [vocab] float32, of the first token


def save(source: str, goldens: Sequence[Golden], *, name: str) -> None:
    """Write both files. Log-probabilities are rounded to 65,536 even levels: at most 4e-4 off, half the bytes."""
    arrays = {}
    records = []
    for golden in goldens:
        low, high = float(golden.logprobs.min()), float(golden.logprobs.max())
        step = (high - low) / 65535
        arrays[golden.name] = np.round((golden.logprobs.astype(np.float64) - low) / step).astype(np.uint16)
        records.append({k: v for k, v in asdict(golden).items() if k != "logprobs"} | {"low": low, "step": step})
    np.savez_compressed(FOLDER / f"{name}.npz", **arrays)
    text = json.dumps({"source": source, "goldens": records}, ensure_ascii=False, indent=1)
    (FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def load(name: str) -> list[Golden]:
    records = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))["goldens"]
    with np.load(FOLDER / f"{name}.npz") as arrays:
        return [
            Golden(
                **{k: v for k, v in record.items() if k not in ("low", "step")},
                logprobs=(arrays[record["name"]] * record["step"] + record["low"]).astype(np.float32),
            )
            for record in records
        ]
