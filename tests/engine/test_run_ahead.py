"""Steps launched before the tokens of the one before are read: the same tokens, texts and ends as step by step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from numba_engine import LLM, EngineConfig, FinishReason, RequestOutput, SamplingParams
from numba_engine.profiling import ProfileSession
from tests.engine.conftest import MakeLLM
from tests.engine.deferred_backend import DeferredBackend
from tests.engine.random_requests import check_random_requests, random_settings
from tests.engine.test_invariance import params, prompts

MakeDeferred = Callable[..., LLM]

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPT = list(range(40, 60))


@pytest.fixture(scope="session")
def graph() -> bool:
    """Of those engines that say what is right: their steps run op by op."""
    return False


@pytest.fixture
def make_deferred(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeDeferred:
    monkeypatch.setattr("numba_engine.engine.loading.create_backend", DeferredBackend)

    def make(**settings: Any) -> LLM:
        return LLM(str(tiny_path), EngineConfig(**{"num_threads": 2, "num_kv_blocks": 128, **settings}))

    return make


def backend_of(llm: LLM) -> DeferredBackend:
    backend = llm.engine.backend
    assert isinstance(backend, DeferredBackend)
    return backend


def log_of(llm: LLM) -> str:
    """One letter a step: a launched anew (with its read), l launched from its graphs, r read."""
    return "".join(backend_of(llm).log).replace("anewread", "a").replace("launch", "l").replace("read", "r")


def collect(llm: LLM) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {}
    while llm.has_unfinished:
        for output in llm.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def test_the_host_reads_one_step_behind_and_stops_at_the_count(make_deferred: MakeDeferred) -> None:
    llm = make_deferred()
    (completion,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    assert len(completion.token_ids) == 6
    assert log_of(llm) == "a" + "ll" + "rl" * 3 + "rr", "five decode steps, none of them for nothing"


def test_without_a_graph_every_step_is_launched_and_read(make_deferred: MakeDeferred, llm: LLM) -> None:
    deferred = make_deferred(graph=False)
    assert deferred.generate(PROMPT, GREEDY)[0].token_ids == llm.generate(PROMPT, GREEDY)[0].token_ids
    assert log_of(deferred) == "a" * 12
    assert backend_of(deferred).num_graphs == 0


def test_each_step_gives_the_tokens_of_one(make_deferred: MakeDeferred) -> None:
    llm = make_deferred()
    llm.add_request("a", PROMPT, GREEDY)
    llm.add_request("b", PROMPT[:3], GREEDY)
    for _ in range(12):
        assert [(o.request_id, len(o.token_ids)) for o in llm.step()] == [("a", 1), ("b", 1)]
    assert not llm.has_unfinished


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("settings", [{}, {"max_num_seqs": 5}, {"max_num_batched_tokens": 7}, {"block_size": 8}])
def test_tokens_are_those_of_the_cpu(
    make_deferred: MakeDeferred, make_llm: MakeLLM, greedy: bool, settings: dict[str, int]
) -> None:
    expected = [completion.token_ids for completion in make_llm().generate(prompts(), params(greedy))]
    llm = make_deferred(**settings)
    assert [completion.token_ids for completion in llm.generate(prompts(), params(greedy))] == expected
    assert llm.stats.num_free_kv_blocks == llm.stats.num_kv_blocks


def test_a_stop_token_wastes_a_row_and_nothing_else(make_deferred: MakeDeferred, llm: LLM) -> None:
    whole = llm.generate(PROMPT, GREEDY)[0].token_ids
    last = next(i for i in range(4, 12) if whole[i] not in whole[:i])
    stopping = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=(whole[last],))
    deferred = make_deferred()
    deferred.add_request("stops", PROMPT, stopping)
    deferred.add_request("goes on", PROMPT[:9], GREEDY)
    outputs = collect(deferred)
    assert tuple(i for output in outputs["stops"] for i in output.token_ids) == whole[: last + 1]
    assert outputs["stops"][-1].finish_reason is FinishReason.STOP_TOKEN
    alone = llm.generate(PROMPT[:9], GREEDY)[0]
    assert tuple(i for output in outputs["goes on"] for i in output.token_ids) == alone.token_ids
    assert log_of(deferred).count("a") == 1
    assert log_of(deferred).count("l") == 11, "the row that was for nothing was in a step of the other's"
    assert deferred.stats.num_free_kv_blocks == deferred.stats.num_kv_blocks


def test_the_last_to_stop_leaves_a_step_that_nobody_waits_for(make_deferred: MakeDeferred, llm: LLM) -> None:
    whole = llm.generate(PROMPT, GREEDY)[0].token_ids
    last = next(i for i in range(4, 12) if whole[i] not in whole[:i])
    stopping = SamplingParams(temperature=0, ignore_eos=True, stop_token_ids=(whole[last],))
    deferred = make_deferred()
    for _ in range(2):
        assert deferred.generate(PROMPT, stopping)[0].token_ids == whole[: last + 1]
    assert log_of(deferred).count("l") - log_of(deferred).count("r") == 2
    assert deferred.step() == []


def test_abort_and_the_same_id_again(make_deferred: MakeDeferred, llm: LLM) -> None:
    """Blocks come back at once, though a step in flight still writes to them: whoever gets them writes after that."""
    expected = [llm.generate(prompt, GREEDY)[0].token_ids for prompt in (PROMPT[:9], PROMPT[5:])]
    deferred = make_deferred(num_kv_blocks=6, max_model_len=48)
    free = deferred.stats.num_free_kv_blocks
    deferred.add_request("same", PROMPT, GREEDY)
    deferred.add_request("stays", PROMPT[:9], GREEDY)
    outputs = [output for _ in range(3) for output in deferred.step()]
    last = deferred.abort("same")
    assert last is not None
    assert last.usage.completion_tokens == 3
    deferred.add_request("same", PROMPT[5:], GREEDY)
    later = collect(deferred)
    stays = [output for output in outputs if output.request_id == "stays"] + later["stays"]
    assert tuple(i for output in stays for i in output.token_ids) == expected[0]
    assert tuple(i for output in later["same"] for i in output.token_ids) == expected[1]
    assert deferred.stats.num_free_kv_blocks == free


def test_outputs_that_wait_when_their_request_is_aborted_are_nobody_s(make_deferred: MakeDeferred, llm: LLM) -> None:
    expected = llm.generate(PROMPT[5:], GREEDY)[0].token_ids
    deferred = make_deferred()
    deferred.add_request("same", PROMPT, GREEDY)
    for _ in range(3):
        deferred.step()
    ProfileSession(deferred).start()  # is done with the step in flight, whose outputs wait for the next step
    last = deferred.abort("same")
    assert last is not None
    assert len(last.token_ids) == 1, "what waited is part of the end"
    assert last.finish_reason is FinishReason.ABORTED
    deferred.add_request("same", PROMPT[5:], GREEDY)
    assert tuple(i for output in collect(deferred)["same"] for i in output.token_ids) == expected


def test_who_has_ended_before_the_abort_has_ended_as_it_did(make_deferred: MakeDeferred) -> None:
    deferred = make_deferred()
    deferred.add_request("ends", PROMPT, SamplingParams(temperature=0, ignore_eos=True, max_tokens=4))
    for _ in range(3):
        deferred.step()
    ProfileSession(deferred).start()
    last = deferred.abort("ends")
    assert last is not None
    assert last.finish_reason is FinishReason.MAX_TOKENS
    assert not deferred.has_unfinished
    assert deferred.abort("ends") is None


def test_another_request_at_the_same_place(make_deferred: MakeDeferred, llm: LLM) -> None:
    """The second decodes from where the first ended, with a state that must not be taken for its own."""
    longer = [*PROMPT, 11, 12, 13]
    expected = [llm.generate(prompt, GREEDY)[0].token_ids for prompt in (PROMPT, longer)]
    deferred = make_deferred()
    ends_at_23 = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    assert deferred.generate(PROMPT, ends_at_23)[0].token_ids == expected[0][:4]
    assert deferred.generate(longer, GREEDY)[0].token_ids == expected[1]


def test_context_full_is_not_overrun(make_deferred: MakeDeferred) -> None:
    llm = make_deferred(max_model_len=32)
    full = llm.generate(PROMPT, SamplingParams(temperature=0, ignore_eos=True))[0]
    assert full.finish_reason is FinishReason.CONTEXT_FULL
    assert full.usage.prompt_tokens + full.usage.completion_tokens == 32
    assert log_of(llm).count("l") == log_of(llm).count("r") == 11


def test_one_that_waits_is_let_in_as_soon_as_it_would_be(make_deferred: MakeDeferred) -> None:
    llm = make_deferred()
    llm.add_request("a", PROMPT, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    for _ in range(4):
        llm.step()
    llm.add_request("b", PROMPT[:5], GREEDY)
    steps = [{output.request_id for output in llm.step()} for _ in range(3)]
    assert steps == [{"a"}, {"a", "b"}, {"a", "b"}], "the step in flight, then one with both"


def test_a_full_engine_runs_ahead_though_others_wait(make_deferred: MakeDeferred) -> None:
    llm = make_deferred(max_num_seqs=1)
    completions = llm.generate([PROMPT, PROMPT[:5]], GREEDY)
    assert [len(completion.token_ids) for completion in completions] == [12, 12]
    assert log_of(llm) == ("a" + "ll" + "rl" * 9 + "rr") * 2


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_preemption(make_deferred: MakeDeferred, make_llm: MakeLLM, prefix_caching: bool) -> None:
    expected = [completion.token_ids for completion in make_llm().generate(prompts(), params(True))]
    llm = make_deferred(num_kv_blocks=9, max_model_len=144, prefix_caching=prefix_caching)
    assert [completion.token_ids for completion in llm.generate(prompts(), params(True))] == expected
    assert llm.stats.num_preemptions > 0
    assert "rl" in log_of(llm)


def test_the_prefix_cache_holds_what_was_computed_ahead(make_deferred: MakeDeferred, llm: LLM) -> None:
    """A conversation goes on from blocks that decode steps filled."""
    longer = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    deferred = make_deferred()
    first = deferred.generate(PROMPT, longer)[0]
    again = [*PROMPT, *first.token_ids, 7, 8, 9]
    second = deferred.generate(again, GREEDY)[0]
    assert second.usage.cached_prompt_tokens == (len(PROMPT) + 39) // 16 * 16
    assert second.token_ids == llm.generate(again, GREEDY)[0].token_ids


def test_steps_without_a_profile_in_one_are_replayed_and_none_runs_ahead(make_deferred: MakeDeferred, llm: LLM) -> None:
    expected = llm.generate(PROMPT, GREEDY)[0].token_ids
    deferred = make_deferred()
    session = ProfileSession(deferred)
    session.start(unprofiled_every=3)
    assert deferred.generate(PROMPT, GREEDY)[0].token_ids == expected
    session.stop()
    assert set(log_of(deferred).split("a")) == {"", "lr"}


def test_a_profile_begins_with_nothing_in_flight(make_deferred: MakeDeferred, llm: LLM) -> None:
    expected = llm.generate(PROMPT, GREEDY)[0].token_ids
    deferred = make_deferred()
    deferred.add_request("a", PROMPT, GREEDY)
    outputs = [output for _ in range(3) for output in deferred.step()]
    session = ProfileSession(deferred)
    session.start()
    while deferred.has_unfinished:
        outputs += deferred.step()
    summary = session.stop()
    assert tuple(i for output in outputs for i in output.token_ids) == expected
    assert log_of(deferred) == "a" + "ll" + "rl" + "rr" + "a" * 8
    assert summary.num_decode_steps == 8


def test_a_prompt_in_between(make_deferred: MakeDeferred, llm: LLM) -> None:
    """Where a step was launched anew the state on the device is behind, and is written before the next replay."""
    scored = SamplingParams(temperature=0, max_tokens=3, logprobs=2, ignore_eos=True)
    expected = [llm.generate(PROMPT, GREEDY)[0], llm.generate(PROMPT[:4], scored)[0]]
    deferred = make_deferred()
    deferred.add_request("a", PROMPT, GREEDY)
    outputs = [output for _ in range(4) for output in deferred.step()]
    deferred.add_request("b", PROMPT[:4], scored)
    rest = collect(deferred)
    tokens = [i for output in [*outputs, *rest["a"]] for i in output.token_ids]
    assert tuple(tokens) == expected[0].token_ids
    assert tuple(p for output in rest["b"] for p in output.logprobs) == expected[1].logprobs
    assert log_of(deferred) == "a" + "ll" + "rl" * 2 + "rr" + "a" + "llrr" + "ll" + "rl" * 2 + "rr"


def test_warming_up_captures_every_batch_size(make_deferred: MakeDeferred, llm: LLM) -> None:
    deferred = make_deferred(max_num_seqs=5)
    before = deferred.stats
    deferred.warm_up()
    assert backend_of(deferred).num_graphs == 2 * 4 + 1, "two of 1, 2, 4 and 5 rows, and 2 with log-probabilities"
    assert deferred.stats == before
    expected = [completion.token_ids for completion in llm.generate([PROMPT] * 3, GREEDY)]
    assert [completion.token_ids for completion in deferred.generate([PROMPT] * 3, GREEDY)] == expected
    assert backend_of(deferred).num_graphs == 2 * 4 + 1


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_a_request_gets_its_own_tokens(make_deferred: MakeDeferred, llm: LLM, seed: int) -> None:
    rng = np.random.default_rng(seed)
    deferred = make_deferred(**random_settings(rng))
    check_random_requests(deferred, llm, rng)
    assert "rl" in log_of(deferred)
