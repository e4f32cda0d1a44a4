"""sample: the reference's choice on many rows, the distribution itself, and the edges."""

from __future__ import annotations

import numpy as np
import pytest

from numba_engine.backends.cpu.backend import CpuBackend
from numba_engine.backends.sampling import Sampled
from tests.kernels.conftest import MakeBackend
from tests.reference import sampling as reference
from tests.reference.sampling import Row, batch_of, room_for

VOCAB = 1003


def logits_of(rng: np.random.Generator, rows: int, vocab: int = VOCAB, spread: float = 3.0) -> np.ndarray:
    return rng.standard_normal((rows, vocab), dtype=np.float32) * np.float32(spread)


def choose(backend: CpuBackend, logits: np.ndarray, rows: list[Row]) -> list[int]:
    return np.asarray(sample(backend, logits, rows).token_ids).tolist()


def sample(backend: CpuBackend, logits: np.ndarray, rows: list[Row], num_top_logprobs: int = -1) -> Sampled:
    sampled = room_for(len(rows), num_top_logprobs)
    backend.sample(sampled, logits.copy(), batch_of(rows))
    return sampled


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.3},
        {"temperature": 50.0},
        {"top_k": 1},
        {"top_k": 40},
        {"top_k": VOCAB},
        {"top_p": 0.05},
        {"top_p": 0.9},
        {"top_p": 0.9999},
        {"min_p": 0.1},
        {"min_p": 1.0},
        {"temperature": 1.7, "top_k": 300, "top_p": 0.8, "min_p": 0.02},
        {"repetition_penalty": 1.3, "prompt": [1, 2, 3, 3], "output": [4, 4, 1]},
        {"presence_penalty": 1.5, "frequency_penalty": -0.7, "prompt": [9], "output": [5, 5, 5, 6], "top_p": 0.95},
        {"bias": {0: 8.5, 7: -100.0, VOCAB - 1: 8.0}},
        {"temperature": 0.0, "repetition_penalty": 5.0, "frequency_penalty": 2.0, "output": list(range(0, VOCAB, 2))},
    ],
    ids=str,
)
def test_chooses_what_the_reference_chooses(
    backend: CpuBackend, rng: np.random.Generator, parameters: dict[str, object]
) -> None:
    rows = [Row(**parameters, seed=int(seed), output_index=i) for i, seed in enumerate(rng.integers(0, 2**63, 60))]  # type: ignore[arg-type]
    rows[0].seed, rows[1].output_index = 2**64 - 1, 2**32 - 1
    logits = logits_of(rng, len(rows))
    logits[::3] = np.round(logits[::3])  # many ties
    assert choose(backend, logits, rows) == [reference.sample(x, r) for x, r in zip(logits, rows, strict=True)]


def test_penalties_leave_no_trace_for_the_next_step(backend: CpuBackend, rng: np.random.Generator) -> None:
    logits = logits_of(rng, 1)
    heavy = Row(temperature=0, repetition_penalty=10, output=list(range(VOCAB)))
    for row in (heavy, Row(temperature=0, repetition_penalty=1.01, output=[3]), heavy):
        assert choose(backend, logits, [row]) == [reference.sample(logits[0], row)]


def test_draws_follow_the_probabilities(backend: CpuBackend) -> None:
    """Chi-square over 20,000 draws: 9 degrees of freedom exceed 27.9 once in a thousand; the seed is fixed."""
    probabilities = np.array([0.3, 0.2, 0.15, 0.1, 0.08, 0.07, 0.05, 0.03, 0.015, 0.005])
    count = 20_000
    logits = np.tile(np.log(probabilities).astype(np.float32), (count, 1))
    tokens = choose(backend, logits, [Row(seed=i // 100, output_index=i % 100) for i in range(count)])
    observed = np.bincount(tokens, minlength=10)
    assert ((observed - count * probabilities) ** 2 / (count * probabilities)).sum() < 27.9


def test_temperature_sharpens_the_distribution(backend: CpuBackend) -> None:
    count = 4000
    logits = np.tile(np.log([0.6, 0.4]).astype(np.float32), (count, 1))
    tokens = choose(backend, logits, [Row(temperature=0.5, seed=i) for i in range(count)])
    assert abs(np.mean(tokens) - 0.16 / 0.52) < 0.03


def test_a_row_is_the_same_in_any_company_and_on_any_threads(
    make_backend: MakeBackend, rng: np.random.Generator
) -> None:
    rows = [Row(temperature=0.8, top_p=0.9, seed=i, output=[i], repetition_penalty=1.1) for i in range(20)]
    logits = logits_of(rng, 20)
    together = choose(make_backend(num_threads=3), logits, rows)
    one = make_backend(num_threads=1)
    assert [choose(one, logits[i : i + 1], rows[i : i + 1])[0] for i in range(20)] == together


def test_a_real_vocabulary(backend: CpuBackend, rng: np.random.Generator) -> None:
    logits = logits_of(rng, 4, 49152)
    rows = [Row(seed=1), Row(top_k=50, seed=2), Row(top_p=0.9, seed=3), Row(temperature=0)]
    assert choose(backend, logits, rows) == [reference.sample(x, r) for x, r in zip(logits, rows, strict=True)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_numbers_that_are_none(backend: CpuBackend, temperature: float) -> None:
    nan, inf = np.nan, np.inf
    logits = np.array(
        [
            [nan, nan, nan, nan, nan],
            [-inf, -inf, -inf, -inf, -inf],
            [nan, -inf, 3, nan, -inf],
            [1, inf, 5, inf, nan],
            [nan, 2, nan, 2, -50],
        ],
        dtype=np.float32,
    )
    rows = [Row(temperature=temperature, top_p=0.9, top_k=3) for _ in logits]
    tokens = choose(backend, logits, rows)
    assert tokens[:4] == [-1, -1, 2, 1]  # -1: none can be chosen
    assert tokens[4] in ((1, 3) if temperature else (1,))


TINY_SHARES = [1e-9, 2.4e-10, 1.2e-10, 1e-12, 1e-30, 1e-45, 1e-60]
"""Of the least positive numbers, also those that float32 and 2^-32 fixed point have as 0."""


@pytest.mark.parametrize("share", TINY_SHARES)
def test_the_likeliest_token_is_kept_however_small_the_share(
    backend: CpuBackend, rng: np.random.Generator, share: float
) -> None:
    logits = logits_of(rng, 7)
    rows = [
        Row(top_p=share), Row(top_p=share, temperature=1e-44), Row(top_p=share, top_k=1), Row(top_p=share, min_p=1),
        Row(min_p=1, temperature=share), Row(top_k=3, min_p=share, temperature=share), Row(temperature=share),
    ]  # fmt: skip
    assert choose(backend, logits, rows) == np.argmax(logits, axis=1).tolist()


def test_logprobs_are_of_the_logits_as_given(backend: CpuBackend, rng: np.random.Generator) -> None:
    logits = np.round(logits_of(rng, 3), 1)
    logits[2, 100:] = np.nan
    rows = [
        Row(temperature=0),
        Row(temperature=0.5, bias={17: 100.0}, repetition_penalty=2, output=[17, 18]),
        Row(temperature=0),
    ]
    sampled = sample(backend, logits, rows, num_top_logprobs=20)
    assert sampled.token_ids[1] == 17
    assert sampled.logprobs is not None
    assert sampled.top_token_ids is not None
    for i in range(3):
        expected = reference.log_softmax(logits[i])
        np.testing.assert_allclose(sampled.logprobs[i], expected[sampled.token_ids[i]], atol=2e-6)
        best = np.argsort(-expected, kind="stable")[:20]
        assert sampled.top_token_ids[i].tolist() == best.tolist()
        np.testing.assert_allclose(sampled.top_logprobs[i], expected[best], atol=2e-6)


def test_no_logprob_where_no_token_can_be_chosen(backend: CpuBackend, rng: np.random.Generator) -> None:
    logits = logits_of(rng, 3, 37)
    logits[1] = np.nan
    rows = [Row(temperature=0), Row(bias={5: 100.0}, repetition_penalty=1.5, output=[5, 6]), Row(temperature=0)]
    sampled = sample(backend, logits, rows, num_top_logprobs=4)
    assert sampled.logprobs is not None
    assert np.asarray(sampled.token_ids).tolist() == [np.argmax(logits[0]), -1, np.argmax(logits[2])]
    assert np.isnan(sampled.logprobs).tolist() == [False, True, False]


def test_logprobs_only_when_wanted(backend: CpuBackend, rng: np.random.Generator) -> None:
    logits = logits_of(rng, 2, 7)
    rows = [Row(), Row()]
    sampled = sample(backend, logits, rows)
    assert (sampled.logprobs, sampled.top_token_ids, sampled.top_logprobs) == (None, None, None)
    sampled = sample(backend, logits, rows, num_top_logprobs=0)
    assert sampled.logprobs is not None
    assert sampled.top_token_ids is not None
    assert sampled.top_token_ids.shape == (2, 0)


def test_reference_generator_is_philox() -> None:
    """Known answers of Random123's kat_vectors for philox4x32-10."""
    assert reference.philox4x32((0, 0, 0, 0), 0) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = 0xFFFFFFFF
    assert reference.philox4x32((ones,) * 4, 2**64 - 1) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
