"""From logits to one token, stage by stage: what ``Backend.sample`` decides, in plain NumPy and float64, by sorting.

The engine's samplers never sort and work in one pass; here every stage can be looked at. Both must draw the same token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from numba_engine.sampling_params import SamplingParams

NUM_SHOWN = 6
"""Candidates of each stage that are kept to be shown."""

Piece = Callable[[int], str]
"""The text of a token by itself."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that is still in the running after a stage."""

    token_id: int
    text: str
    logit: float
    """As this stage left it."""
    probability: float
    """Among the tokens that are left."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of the way from logits to a choice."""

    name: str
    setting: str
    """What the request asked for, "off" where the stage changes nothing by request."""
    num_left: int
    mass: float
    """Probability that the tokens left had before any was dropped."""
    top: tuple[Candidate, ...]
    """Most likely first, ties by lower id."""


@dataclass(frozen=True, slots=True)
class Runner:
    """A token in the draw: an exponential race, won by the largest probability / -log(u)."""

    token_id: int
    text: str
    probability: float
    uniform: float
    """u in (0, 1), from Philox-4x32-10 keyed by seed, output index and token id alone."""
    score: float


@dataclass(frozen=True, slots=True)
class Choice:
    """The stages, the draw, and its winner beside the token that the engine's own sampler chose."""

    seed: int
    output_index: int
    """Tokens put out before this one; the counter of the random numbers."""
    greedy: bool
    """No draw: the most likely token is taken."""
    stages: tuple[Stage, ...]
    race: tuple[Runner, ...]
    """The best of the draw, winner first; empty when greedy."""
    token_id: int
    engine_token_id: int

    @property
    def agrees(self) -> bool:
        return self.token_id == self.engine_token_id


def choose(
    logits: np.ndarray,
    params: SamplingParams,
    *,
    prompt_token_ids: Sequence[int],
    output_token_ids: Sequence[int],
    engine_token_id: int,
    piece: Piece,
) -> Choice:
    """Take logits ``[V]`` float32, as the model gave them, through every stage of ``params``, whose seed is given."""
    assert params.seed is not None
    seed = params.seed
    raw = np.where(np.isnan(logits), -np.inf, logits).astype(np.float32)
    adjusted = _adjusted(raw, params, prompt_token_ids, output_token_ids)
    best = int(np.argmax(adjusted))  # the lowest id of the largest
    greedy = params.temperature == 0 or not bool(np.isfinite(adjusted[best]))
    output_index = len(output_token_ids)

    look = _Look(piece)
    look.at("logits", "from the model", raw, _exp(raw, 1.0))
    look.at("penalties, bias", _adjustments(params), adjusted, _exp(adjusted, 1.0))
    if greedy:
        look.at("greedy", "temperature 0", adjusted, np.arange(adjusted.size) == best)
        return Choice(seed, output_index, True, look.stages, (), best, engine_token_id)

    temperature = float(np.float32(params.temperature))
    whole = _exp(adjusted, temperature)
    scaled = adjusted.astype(np.float64) / temperature
    left = whole
    look.at("temperature", f"divide by {params.temperature:g}", scaled, left, whole)
    left = _top_k(adjusted, left, params.top_k)
    look.at("top-k", f"keep {params.top_k:,}" if params.top_k else "off", scaled, left, whole)
    left = _top_p(left, float(np.float32(params.top_p)))
    look.at("top-p", f"reach {params.top_p:g}" if params.top_p < 1 else "off", scaled, left, whole)
    left = np.where(left >= float(np.float32(params.min_p)) * left.max(), left, 0.0)
    look.at("min-p", f"{params.min_p:g} of the best" if params.min_p else "off", scaled, left, whole)
    probabilities = left / left.sum()
    look.at("softmax", "sums to 1", scaled, probabilities, whole)
    race = _race(probabilities, seed, output_index, piece)
    return Choice(seed, output_index, False, look.stages, race, race[0].token_id, engine_token_id)


class _Look:
    """Collects the stages."""

    def __init__(self, piece: Piece) -> None:
        self._piece = piece
        self.stages: tuple[Stage, ...] = ()

    def at(
        self, name: str, setting: str, logits: np.ndarray, weights: np.ndarray, whole: np.ndarray | None = None
    ) -> None:
        """``weights`` are probabilities up to a factor, 0 for what was dropped; ``whole``: before anything was."""
        weights = weights.astype(np.float64)
        total = weights.sum()
        # The logits break the ties of probabilities so small that they are all 0.
        order = np.lexsort((-logits.astype(np.float64), -weights))[:NUM_SHOWN]
        top = tuple(
            Candidate(int(i), self._piece(int(i)), float(logits[i]), float(weights[i] / total))
            for i in order
            if weights[i] > 0
        )
        mass = 1.0 if whole is None else float(whole[weights > 0].sum() / whole.sum())
        self.stages += (Stage(name, setting, int((weights > 0).sum()), mass, top),)


def _adjusted(
    logits: np.ndarray, params: SamplingParams, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
) -> np.ndarray:
    """Penalties and bias, each operation rounded to float32, as the engine does."""
    values = logits.copy()
    if _has_penalties(params):
        counts = Counter(output_token_ids)
        repetition, presence, frequency = (
            np.float32(value)
            for value in (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        )
        for token in {*prompt_token_ids, *output_token_ids}:
            values[token] = values[token] / repetition if values[token] > 0 else values[token] * repetition
            if counts[token]:
                values[token] -= presence
                values[token] -= frequency * np.float32(counts[token])
    for token, bias in params.logit_bias.items():
        values[token] += np.float32(bias)
    return values


def _has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def _adjustments(params: SamplingParams) -> str:
    given = []
    if params.repetition_penalty != 1:
        given.append(f"repetition {params.repetition_penalty:g}")
    if params.presence_penalty != 0:
        given.append(f"presence {params.presence_penalty:g}")
    if params.frequency_penalty != 0:
        given.append(f"frequency {params.frequency_penalty:g}")
    if params.logit_bias:
        given.append(f"bias on {len(params.logit_bias)}")
    return ", ".join(given) or "off"


def _exp(values: np.ndarray, temperature: float) -> np.ndarray:
    """e^((value - max) / temperature) [V] float64: softmax up to a factor. A maximum that is infinite is certain."""
    largest = float(values.max())
    if not np.isfinite(largest):
        return (np.arange(values.size) == int(np.argmax(values))).astype(np.float64)
    return np.exp((values.astype(np.float64) - largest) / temperature)


def _top_k(values: np.ndarray, weights: np.ndarray, k: int) -> np.ndarray:
    """Every token whose logit is at least the k-th largest."""
    if not 0 < k < values.size:
        return weights
    return np.where(values >= np.sort(values)[-k], weights, 0.0)


def _top_p(weights: np.ndarray, top_p: float) -> np.ndarray:
    """Of what is left, every token at least as likely as the last one that is needed to reach top_p."""
    if top_p >= 1:
        return weights
    descending = np.sort(weights)[::-1]
    reached = np.cumsum(descending)
    last = min(int(np.searchsorted(reached, top_p * reached[-1])), weights.size - 1)
    return np.where(weights >= descending[last], weights, 0.0)


def _race(probabilities: np.ndarray, seed: int, output_index: int, piece: Piece) -> tuple[Runner, ...]:
    """argmax of p / -log u draws token i with probability p_i: each -log u / p is exponential with rate p_i."""
    uniforms = philox_uniforms(probabilities.size, seed, output_index)
    scores = np.where(probabilities > 0, probabilities / -np.log(uniforms), -1.0)
    order = np.argsort(-scores, kind="stable")[:NUM_SHOWN]
    return tuple(
        Runner(int(i), piece(int(i)), float(probabilities[i]), float(uniforms[i]), float(scores[i]))
        for i in order
        if probabilities[i] > 0
    )


def philox_uniforms(count: int, seed: int, output_index: int) -> np.ndarray:
    """u [count] float64 of token ids 0, 1, …: (bits + 0.5) 2^-32 of Philox-4x32-10 (Salmon et al. 2011).

    The key is the seed, low word first; the counter of token id i is (i // 4, output_index, 0, 0), its word i % 4.
    """
    low = np.uint64(0xFFFFFFFF)
    c0 = np.arange(-(-count // 4), dtype=np.uint64)
    c1 = np.full_like(c0, output_index)
    c2, c3 = np.zeros_like(c0), np.zeros_like(c0)
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (
            (p1 >> np.uint64(32)) ^ c1 ^ np.uint64(k0),
            p1 & low,
            (p0 >> np.uint64(32)) ^ c3 ^ np.uint64(k1),
            p0 & low,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    words = np.stack([c0, c1, c2, c3], axis=1).reshape(-1)[:count]
    return (words.astype(np.float64) + 0.5) * 2.0**-32
