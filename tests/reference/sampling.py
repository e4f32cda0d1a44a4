"""The sampler of ``Backend.sample``, one row at a time, by sorting, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from numba_engine.backends.sampling import Sampled, Sampling


@dataclass
class Row:
    """Sampling parameters of one row of logits."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    output_index: int = 0
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    bias: dict[int, float] = field(default_factory=dict)


def batch_of(rows: Sequence[Row]) -> Sampling:
    """The rows as the engine hands them to a backend."""

    def column(name: str, dtype: type) -> np.ndarray:
        return np.array([getattr(row, name) for row in rows], dtype=dtype)

    def ends(lengths: list[int]) -> np.ndarray:
        return np.cumsum(lengths).astype(np.int32)

    histories = [[*row.prompt, *row.output] for row in rows]
    return Sampling(
        temperature=column("temperature", np.float32),
        top_k=column("top_k", np.int32),
        top_p=column("top_p", np.float32),
        min_p=column("min_p", np.float32),
        repetition_penalty=column("repetition_penalty", np.float32),
        presence_penalty=column("presence_penalty", np.float32),
        frequency_penalty=column("frequency_penalty", np.float32),
        seed=column("seed", np.uint64),
        output_index=column("output_index", np.uint32),
        history_begins=ends([0, *[len(h) for h in histories[:-1]]]),
        history_ends=ends([len(h) for h in histories]),
        history=np.array([t for h in histories for t in h], dtype=np.int32),
        history_prompt_lens=np.array([len(row.prompt) for row in rows], dtype=np.int32),
        bias_begins=ends([0, *[len(row.bias) for row in rows[:-1]]]),
        bias_ends=ends([len(row.bias) for row in rows]),
        bias_token_ids=np.array([t for row in rows for t in row.bias], dtype=np.int32),
        bias_values=np.array([v for row in rows for v in row.bias.values()], dtype=np.float32),
        changes_logits=any([*histories, *[row.bias for row in rows]]),
    )


def room_for(num_rows: int, num_top_logprobs: int = -1) -> Sampled:
    """For what is sampled, full of what cannot be; -1: without log-probabilities."""
    token_ids, logprobs = np.full(num_rows, -1, np.int32), np.full(num_rows, np.nan, np.float32)
    if num_top_logprobs < 0:
        return Sampled(token_ids)
    shape = num_rows, num_top_logprobs
    return Sampled(token_ids, logprobs, np.full(shape, -1, np.int32), np.full(shape, np.nan, np.float32))


def sample(logits: np.ndarray, row: Row) -> int:
    """The token id that ``row`` chooses from logits [V] float32; -1 where nothing is above -inf."""
    adjusted = adjust(logits, row)
    best = int(np.argmax(adjusted))  # the lowest id of the largest
    if adjusted[best] == -np.inf:
        return -1
    if row.temperature == 0 or not np.isfinite(adjusted[best]):
        return best
    probabilities = filtered(adjusted, row)
    races = np.where(probabilities > 0, probabilities / exponentials(row.seed, row.output_index, len(logits)), -1)
    return int(np.argmax(races))


def adjust(logits: np.ndarray, row: Row) -> np.ndarray:
    """Penalties and bias, each operation rounded to float32; NaN as -inf."""
    values = np.where(np.isnan(logits), -np.inf, logits).astype(np.float32)
    output = list(row.output)
    neutral = row.repetition_penalty == 1 and row.presence_penalty == 0 and row.frequency_penalty == 0
    for token in set() if neutral else {*row.prompt, *output}:
        repetition = np.float32(row.repetition_penalty)
        values[token] = values[token] / repetition if values[token] > 0 else values[token] * repetition
        if count := output.count(token):
            values[token] -= np.float32(row.presence_penalty)
            values[token] -= np.float32(row.frequency_penalty) * np.float32(count)
    for token, bias in row.bias.items():
        values[token] += np.float32(bias)
    return values


def filtered(values: np.ndarray, row: Row) -> np.ndarray:
    """Unnormalised probabilities [V] after temperature, top-k, top-p and min-p."""
    w = (values.astype(np.float64) - float(values.max())) / float(np.float32(row.temperature))
    p = np.exp(w)
    if 0 < row.top_k < len(p):
        p = np.where(values >= np.sort(values)[-row.top_k], p, 0)
    if row.top_p < 1:
        descending = np.sort(p)[::-1]
        reached = np.cumsum(descending)
        last = np.searchsorted(reached, float(np.float32(row.top_p)) * reached[-1])
        p = np.where(p >= descending[min(last, len(p) - 1)], p, 0)
    return np.where(p >= float(np.float32(row.min_p)) * p.max(), p, 0)


def exponentials(seed: int, output_index: int, count: int) -> np.ndarray:
    """-log u of each token id."""
    words = [word for block in range(-(-count // 4)) for word in philox4x32((block, output_index, 0, 0), seed)]
    return -np.log((np.array(words[:count], dtype=np.float64) + 0.5) * 2.0**-32)


def philox4x32(counter: tuple[int, int, int, int], key: int) -> tuple[int, int, int, int]:
    """Philox-4x32-10 (Salmon et al. 2011), the 64-bit key's low word first."""
    c0, c1, c2, c3 = counter
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c3 ^ k1, p0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def log_softmax(logits: np.ndarray) -> np.ndarray:
    values = np.where(np.isnan(logits), -np.inf, logits).astype(np.float64)
    return values - values.max() - np.log(np.exp(values - values.max()).sum())
