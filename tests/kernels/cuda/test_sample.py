"""sample: the reference's choice, token for token; log-probabilities; and no trace left for the next step."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from numba_engine.backends.cuda.backend import CudaBackend
from numba_engine.backends.cuda.kernels.sample import GROUP, SLICE
from numba_engine.execution.sampling import SampledTokens, download
from tests.kernels.cuda.conftest import normal
from tests.kernels.test_sample import TINY_SHARES
from tests.reference import sampling as reference
from tests.reference.sampling import Row, batch_of, room_for

VOCAB = 1003


def choose(backend: CudaBackend, logits: np.ndarray, rows: list[Row], num_top_logprobs: int = -1) -> SampledTokens:
    sampled = uploaded(backend, room_for(len(rows), num_top_logprobs))
    backend.sample(sampled, backend.upload(logits), uploaded(backend, batch_of(rows)))
    return download(sampled, backend)


def uploaded(backend: CudaBackend, value: Any) -> Any:
    """A dataclass of host arrays, with its arrays on the device."""
    arrays = {part.name: getattr(value, part.name) for part in fields(value)}
    return replace(value, **{name: backend.upload(a) for name, a in arrays.items() if isinstance(a, np.ndarray)})


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 50.0},
        {"top_k": 1},
        {"top_k": 40},
        {"top_k": VOCAB},
        {"top_p": 0.05},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"min_p": 1.0},
        {"temperature": 1.7, "top_k": 300, "top_p": 0.8, "min_p": 0.02},
        {"repetition_penalty": 1.3, "prompt": [1, 2, 3, 3], "output": [4, 4, 1]},
        {"presence_penalty": 1.5, "frequency_penalty": -0.7, "prompt": [9], "output": [5, 5, 5, 6], "top_p": 0.95},
        {"bias": {0: 8.5, 7: -100.0, VOCAB - 1: 8.0}},
        {"temperature": 0.0, "repetition_penalty": 5.0, "frequency_penalty": 2.0, "output": list(range(0, VOCAB, 2))},
    ],
    ids=lambda p: "-".join(p) or "plain",
)
def test_chooses_what_the_reference_chooses(
    backend: CudaBackend, rng: np.random.Generator, parameters: dict[str, object]
) -> None:
    rows = [Row(**parameters, seed=int(seed), output_index=i) for i, seed in enumerate(rng.integers(0, 2**63, 30))]  # type: ignore[arg-type]
    rows[0].seed, rows[1].output_index = 2**64 - 1, 2**32 - 1
    logits = normal(rng, len(rows), VOCAB) * np.float32(3)
    logits[::3] = np.round(logits[::3])  # many ties
    expected = [reference.sample(x, row) for x, row in zip(logits, rows, strict=True)]
    assert choose(backend, logits, rows).token_ids.tolist() == expected


@pytest.mark.parametrize("vocab", [1, 3, 4, 33, 128, 257, 2048, 4097, 5000])
def test_vocabularies_of_any_size(backend: CudaBackend, rng: np.random.Generator, vocab: int) -> None:
    groups = -(-vocab // GROUP)
    rows = [Row(seed=i, top_k=max(1, vocab // 2), top_p=0.7) for i in range(4)]
    rows += [Row(seed=i, top_k=k, temperature=9) for i, k in enumerate([1, groups, groups + 1, vocab - 1, vocab + 5])]
    rows += [Row(seed=i, temperature=3) for i in range(4)] + [Row(temperature=0), Row(top_p=0.3), Row(min_p=0.4)]
    logits = normal(rng, len(rows), vocab) * np.float32(3)
    expected = [reference.sample(x, row) for x, row in zip(logits, rows, strict=True)]
    assert choose(backend, logits, rows).token_ids.tolist() == expected


@pytest.mark.parametrize("vocab", [2 * SLICE, 2 * SLICE + 1])
def test_ties_across_slices(backend: CudaBackend, rng: np.random.Generator, vocab: int) -> None:
    """The k-th largest is in both slices; the largest as well, alone or in a slice that has nothing else."""
    parameters = [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_k": 70}, {"top_k": 3, "top_p": 0.4}, {"min_p": 0.9}]
    rows = [Row(**p, seed=i) for i, p in enumerate(parameters * 4)]  # type: ignore[arg-type]
    logits = np.round(normal(rng, len(rows), vocab))
    logits[:, [SLICE - 1, SLICE, vocab - 1]] = 5
    logits[::2, :SLICE] = -np.inf
    logits[1::4, GROUP : SLICE + GROUP] = -np.inf
    expected = [reference.sample(x, row) for x, row in zip(logits, rows, strict=True)]
    assert choose(backend, logits, rows).token_ids.tolist() == expected


def test_close_races_of_groups_are_run_again(backend: CudaBackend, rng: np.random.Generator) -> None:
    """Two groups whose races end within float32's accuracy of each other, by their own maxima or by the row's; a row
    with a min_p that keeps all has every group run again."""
    num_rows = 300
    logits = normal(rng, num_rows, 3 * GROUP) * np.float32(3)
    logits[:, GROUP : 2 * GROUP] = -np.inf
    for seed, row in enumerate(logits):
        races = row - np.log(reference.exponentials(seed, 0, row.size))
        row[2 * GROUP :] += np.float32(races[:GROUP].max() - races[2 * GROUP :].max() + rng.normal() * 1e-6)
    plain = choose(backend, logits, [Row(seed=i) for i in range(num_rows)]).token_ids
    assert (
        plain.tolist()
        == choose(backend, logits, [Row(seed=i, min_p=1e-30) for i in range(num_rows)]).token_ids.tolist()
    )
    assert 0.3 < (plain < GROUP).mean() < 0.7


def test_rows_do_not_depend_on_each_other(backend: CudaBackend, rng: np.random.Generator) -> None:
    rows = [Row(seed=i, temperature=0.0 if i % 2 else 1.0, top_p=0.9 if i % 3 else 1.0) for i in range(6)]
    logits = normal(rng, 6, 257)
    together = choose(backend, logits, rows).token_ids
    for i in (0, 3, 5):
        assert choose(backend, logits[i : i + 1], rows[i : i + 1]).token_ids[0] == together[i]


def test_exponentials_near_both_ends(backend: CudaBackend) -> None:
    """Equal logits, so that the draw alone decides: all of 4000 uniform numbers are compared."""
    logits = np.zeros((40, 4000), dtype=np.float32)
    rows = [Row(seed=i) for i in range(40)]
    assert choose(backend, logits, rows).token_ids.tolist() == [reference.sample(logits[0], row) for row in rows]


@pytest.mark.parametrize("share", TINY_SHARES)
def test_the_likeliest_token_is_kept_however_small_the_share(
    backend: CudaBackend, rng: np.random.Generator, share: float
) -> None:
    logits = normal(rng, 7, VOCAB) * np.float32(3)
    rows = [
        Row(top_p=share), Row(top_p=share, temperature=1e-44), Row(top_p=share, top_k=1), Row(top_p=share, min_p=1),
        Row(min_p=1, temperature=share), Row(top_k=3, min_p=share, temperature=share), Row(temperature=share),
    ]  # fmt: skip
    assert choose(backend, logits, rows).token_ids.tolist() == np.argmax(logits, axis=1).tolist()


def test_no_logprob_where_no_token_can_be_chosen(backend: CudaBackend, rng: np.random.Generator) -> None:
    logits = normal(rng, 3, 37)
    logits[1] = np.nan
    rows = [Row(temperature=0), Row(bias={5: 100.0}, repetition_penalty=1.5, output=[5, 6]), Row(temperature=0)]
    sampled = choose(backend, logits, rows, num_top_logprobs=4)
    assert sampled.logprobs is not None
    assert sampled.token_ids.tolist() == [np.argmax(logits[0]), -1, np.argmax(logits[2])]
    assert np.isnan(sampled.logprobs).tolist() == [False, True, False]


def test_logprobs_are_of_the_raw_logits(backend: CudaBackend, rng: np.random.Generator) -> None:
    logits = normal(rng, 3, VOCAB) * np.float32(3)
    logits[1] = np.round(logits[1])
    best = [int(np.argmax(row)) for row in logits]
    rows = [
        Row(temperature=0, repetition_penalty=1.01, output=[best[0]]),
        Row(temperature=0),
        Row(temperature=0, bias={best[2]: 3.0, 5: 1.0}),
    ]
    sampled = choose(backend, logits, rows, num_top_logprobs=7)
    expected = np.stack([reference.log_softmax(row) for row in logits])
    order = np.argsort(-expected, axis=1, kind="stable")[:, :7]
    assert sampled.logprobs is not None
    assert sampled.top_token_ids is not None
    chosen = expected[np.arange(3), sampled.token_ids]
    np.testing.assert_allclose(sampled.logprobs, chosen, atol=5e-6)
    np.testing.assert_array_equal(sampled.top_token_ids, order)
    np.testing.assert_allclose(sampled.top_logprobs, np.take_along_axis(expected, order, axis=1), atol=5e-6)


def test_no_top_tokens_but_the_logprob(backend: CudaBackend, rng: np.random.Generator) -> None:
    sampled = choose(backend, normal(rng, 2, 33), [Row(seed=1), Row(seed=2)], num_top_logprobs=0)
    assert sampled.logprobs is not None
    assert (sampled.logprobs < 0).all()
    assert sampled.top_token_ids is not None
    assert sampled.top_token_ids.shape == (2, 0)


def test_penalties_leave_no_trace_for_the_next_step(backend: CudaBackend, rng: np.random.Generator) -> None:
    logits = normal(rng, 1, VOCAB)
    heavy = Row(temperature=0, repetition_penalty=10, output=list(range(VOCAB)))
    for row in (heavy, Row(temperature=0, repetition_penalty=1.01, output=[3]), heavy):
        assert choose(backend, logits, [row]).token_ids[0] == reference.sample(logits[0], row)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers(backend: CudaBackend, temperature: float) -> None:
    nan, inf = np.nan, np.inf
    logits = np.array([[nan, 1, nan, 0.5], [-inf, nan, -inf, -inf], [0, inf, inf, nan], [nan] * 4], dtype=np.float32)
    rows = [Row(temperature=temperature, seed=i, top_p=0.9) for i in range(4)]
    expected = [reference.sample(x, row) for x, row in zip(logits, rows, strict=True)]
    assert choose(backend, logits, rows).token_ids.tolist() == expected
