"""A request's tokens are its own: the same alone, in company, in chunks, after preemption, from the cache."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from numba_engine import LLM, RequestOutput, SamplingParams
from numba_engine.profiling import ProfileSession
from tests.engine.conftest import MakeLLM

NUM_REQUESTS = 8


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(7)
    lengths = [1, 3, 17, 16, 40, 33, 70, 2]
    return [rng.integers(3, 300, length).tolist() for length in lengths]


def params(greedy: bool) -> list[SamplingParams]:
    if greedy:
        return [SamplingParams(temperature=0, max_tokens=10 + 3 * i, ignore_eos=True) for i in range(NUM_REQUESTS)]
    return [
        SamplingParams(
            temperature=0.7 + 0.1 * i,
            top_k=(0, 40)[i % 2],
            top_p=(1.0, 0.9, 0.7)[i % 3],
            min_p=(0.0, 0.05)[i // 2 % 2],
            repetition_penalty=(1.0, 1.3)[i // 4],
            frequency_penalty=(0.0, 0.5)[i // 3 % 2],
            seed=1000 + i,
            max_tokens=10 + 3 * i,
            ignore_eos=True,
        )
        for i in range(NUM_REQUESTS)
    ]


def tokens_alone(llm: LLM, greedy: bool) -> list[tuple[int, ...]]:
    return [llm.generate([p], own)[0].token_ids for p, own in zip(prompts(), params(greedy), strict=True)]


@pytest.fixture(scope="module", params=[True, False], ids=["greedy", "seeded"])
def greedy(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def expected(make_llm: MakeLLM, greedy: bool) -> list[tuple[int, ...]]:
    tokens = tokens_alone(make_llm(prefix_caching=False), greedy)
    assert [len(own) for own in tokens] == [own.max_tokens for own in params(greedy)]
    assert len({own[:8] for own in tokens}) == NUM_REQUESTS, "the requests must differ, or the test shows nothing"
    return tokens


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_prefill_in_chunks(make_llm: MakeLLM, greedy: bool, expected: list[tuple[int, ...]], chunk: int) -> None:
    assert tokens_alone(make_llm(max_num_batched_tokens=chunk, prefix_caching=False), greedy) == expected


def test_in_a_batch(make_llm: MakeLLM, greedy: bool, expected: list[tuple[int, ...]]) -> None:
    llm = make_llm(prefix_caching=False)
    completions = llm.generate(prompts(), params(greedy))
    assert [completion.token_ids for completion in completions] == expected


@pytest.mark.parametrize("chunk", [7, 64])
def test_with_others_joining_and_leaving(
    make_llm: MakeLLM, greedy: bool, expected: list[tuple[int, ...]], chunk: int
) -> None:
    llm = make_llm(max_num_batched_tokens=chunk, prefix_caching=False)
    arrivals = iter(zip(prompts(), params(greedy), strict=True))
    outputs: list[RequestOutput] = []
    for i in itertools.count():
        if i % 3 == 0 and (arrival := next(arrivals, None)):
            llm.add_request(str(i // 3), *arrival)
            llm.add_request(f"leaves-{i}", [5, 6, 7, i % 50], SamplingParams(max_tokens=100, ignore_eos=True, seed=i))
        if i % 5 == 4:
            llm.abort(f"leaves-{i - i % 3 - 3}")
        outputs += llm.step()
        if not llm.has_unfinished:
            break
    tokens = [tuple(t for o in outputs if o.request_id == str(i) for t in o.token_ids) for i in range(NUM_REQUESTS)]
    assert tokens == expected


def test_after_forced_preemption(make_llm: MakeLLM, greedy: bool, expected: list[tuple[int, ...]]) -> None:
    llm = make_llm(num_kv_blocks=9, max_model_len=144, prefix_caching=False)
    before = llm.stats.num_preemptions
    completions = llm.generate(prompts(), params(greedy))
    assert llm.stats.num_preemptions > before
    assert sum(completion.timings.num_preemptions for completion in completions) > 0
    assert [completion.token_ids for completion in completions] == expected


def test_preemption_with_prefix_caching(make_llm: MakeLLM, greedy: bool, expected: list[tuple[int, ...]]) -> None:
    llm = make_llm(num_kv_blocks=9, max_model_len=144)
    completions = llm.generate(prompts(), params(greedy))
    assert [completion.token_ids for completion in completions] == expected


def test_from_the_prefix_cache(make_llm: MakeLLM, greedy: bool, expected: list[tuple[int, ...]]) -> None:
    llm = make_llm()
    llm.generate(prompts(), params(greedy))
    again = llm.generate(prompts(), params(greedy))
    assert [completion.token_ids for completion in again] == expected
    cached = [completion.usage.cached_prompt_tokens for completion in again]
    assert cached == [(len(p) - 1) // 16 * 16 for p in prompts()]


@pytest.mark.parametrize("threads", [1, 3])
def test_with_other_numbers_of_threads(
    make_llm: MakeLLM, greedy: bool, expected: list[tuple[int, ...]], threads: int
) -> None:
    llm = make_llm(num_threads=threads, prefix_caching=False)
    completions = llm.generate(prompts(), params(greedy))
    assert [completion.token_ids for completion in completions] == expected


def test_block_size_does_not_matter(make_llm: MakeLLM, greedy: bool, expected: list[tuple[int, ...]]) -> None:
    llm = make_llm(block_size=32, prefix_caching=False)
    completions = llm.generate(prompts(), params(greedy))
    assert [completion.token_ids for completion in completions] == expected


def test_fused_phases_or_textbook_ops(make_llm: MakeLLM, greedy: bool, expected: list[tuple[int, ...]]) -> None:
    llm = make_llm(fusion=False, prefix_caching=False)
    completions = llm.generate(prompts(), params(greedy))
    assert [completion.token_ids for completion in completions] == expected


def test_without_fusion_only_textbook_ops_run(make_llm: MakeLLM) -> None:
    phases = {"norm_qkv_rope_store", "norm_gate_up_act", "norm_lm_head"}
    for fusion in (True, False):
        llm = make_llm(fusion=fusion, prefix_caching=False)
        session = ProfileSession(llm)
        session.start()
        llm.generate([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True))
        ran = {op.name for op in session.stop().ops}
        assert phases & ran == (phases if fusion else set())
