"""What requests get: their stops, their text, their log-probabilities, and clear refusals."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import pytest

from numba_engine import (
    LLM,
    Completion,
    EngineConfig,
    FinishReason,
    InvalidRequestError,
    QueueFullError,
    SamplingParams,
)
from tests.engine.conftest import MakeLLM
from tests.tiny_models import TinyModel, write_hf

PROMPT = list(range(40, 60))


def run(llm: LLM, **sampling: object) -> Completion:
    return llm.generate([PROMPT], SamplingParams(**{"temperature": 0, "max_tokens": 24, **sampling}))[0]  # type: ignore[arg-type]


@pytest.fixture
def plain(llm: LLM) -> Completion:
    """Greedy, with no other end than 24 tokens."""
    return run(llm, ignore_eos=True)


def test_max_tokens(llm: LLM, plain: Completion) -> None:
    assert plain.finish_reason is FinishReason.MAX_TOKENS
    assert len(plain.token_ids) == plain.usage.completion_tokens == 24
    assert plain.usage.prompt_tokens == len(PROMPT)
    assert plain.text == llm.detokenize(plain.token_ids, skip_special_tokens=True)


def test_a_stop_token_ends_it_and_has_no_text(llm: LLM, plain: Completion) -> None:
    stop_id = plain.token_ids[5]
    first = plain.token_ids.index(stop_id)
    stopped = run(llm, ignore_eos=True, stop_token_ids=(stop_id,))
    assert stopped.finish_reason is FinishReason.STOP_TOKEN
    assert stopped.stop_token_id == stop_id
    assert stopped.token_ids == plain.token_ids[: first + 1]
    assert stopped.text == llm.detokenize(plain.token_ids[:first], skip_special_tokens=True)


def test_the_models_own_end_token(llm: LLM) -> None:
    eos = llm.model_info.eos_token_ids[0]
    ended = run(llm, logit_bias={eos: 100.0})
    assert (ended.finish_reason, ended.stop_token_id, ended.text) == (FinishReason.STOP_TOKEN, eos, "")
    assert run(llm, logit_bias={eos: 100.0}, ignore_eos=True).token_ids == (eos,) * 24


@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_stop_string_across_tokens(llm: LLM, plain: Completion, length: int) -> None:
    middle = len(plain.text) // 2
    stop = plain.text[middle : middle + length]
    stopped = run(llm, ignore_eos=True, stop=(stop,))
    assert stopped.finish_reason is FinishReason.STOP_SEQUENCE
    assert stopped.stop_sequence == stop
    assert stopped.text == plain.text[: plain.text.index(stop)]
    assert stopped.token_ids == plain.token_ids[: len(stopped.token_ids)]


def test_text_held_back_for_a_stop_that_never_comes_goes_out_at_the_end(llm: LLM, plain: Completion) -> None:
    unmatched = run(llm, ignore_eos=True, stop=(plain.text[-1] + "\x00 never",))
    assert unmatched.text == plain.text


def test_context_full(make_llm: MakeLLM) -> None:
    llm = make_llm(max_model_len=32)
    full = llm.generate([PROMPT], SamplingParams(temperature=0, ignore_eos=True))[0]
    assert full.finish_reason is FinishReason.CONTEXT_FULL
    assert full.usage.prompt_tokens + full.usage.completion_tokens == 32


def test_time_limit_keeps_what_was_generated(llm: LLM) -> None:
    limited = run(llm, ignore_eos=True, max_tokens=None, time_limit_s=0.02)
    assert limited.finish_reason in (FinishReason.TIME_LIMIT, FinishReason.CONTEXT_FULL)
    assert limited.text == llm.detokenize(limited.token_ids, skip_special_tokens=True)


def test_time_limit_ends_a_waiting_request(make_llm: MakeLLM) -> None:
    llm = make_llm(max_num_seqs=1)
    llm.add_request("runs", PROMPT, SamplingParams(ignore_eos=True, max_tokens=200))
    llm.add_request("waits", PROMPT, SamplingParams(time_limit_s=1e-6))
    outputs = llm.step()
    (late,) = [output for output in outputs if output.request_id == "waits"]
    assert (late.finish_reason, late.token_ids) == (FinishReason.TIME_LIMIT, ())
    llm.abort("runs")


def test_abort_frees_at_once(llm: LLM) -> None:
    free = llm.stats.num_free_kv_blocks
    llm.add_request("a", PROMPT, SamplingParams(ignore_eos=True))
    llm.step()
    assert llm.stats.num_free_kv_blocks < free
    last = llm.abort("a")
    assert last is not None
    assert last.finish_reason is FinishReason.ABORTED
    assert llm.stats.num_free_kv_blocks == free
    assert llm.abort("a") is None
    assert llm.step() == []


def test_closing_a_stream_aborts_it(llm: LLM) -> None:
    stream = llm.stream(PROMPT, SamplingParams(ignore_eos=True))
    next(stream)
    stream.close()
    assert not llm.has_unfinished


def test_stream_deltas_concatenate_to_the_completion(llm: LLM, plain: Completion) -> None:
    outputs = list(llm.stream(PROMPT, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)))
    assert "".join(output.text for output in outputs) == plain.text
    assert tuple(i for output in outputs for i in output.token_ids) == plain.token_ids
    assert [output.finished for output in outputs] == [False] * 23 + [True]


def test_logprobs(llm: LLM) -> None:
    scored = run(llm, ignore_eos=True, logprobs=4)
    assert len(scored.logprobs) == len(scored.token_ids)
    for token_id, position in zip(scored.token_ids, scored.logprobs, strict=True):
        assert position.chosen.token_id == position.top[0].token_id == token_id, "greedy takes the likeliest"
        assert position.chosen.logprob == position.top[0].logprob
        values = [candidate.logprob for candidate in position.top]
        assert len(values) == 4
        assert values == sorted(values, reverse=True)
        assert sum(math.exp(value) for value in values) < 1.0
        assert position.chosen.text == llm.detokenize([token_id])
    assert all(position.top == () for position in run(llm, ignore_eos=True, logprobs=0).logprobs)


def test_logprobs_of_one_request_do_not_reach_another(llm: LLM) -> None:
    asked, not_asked = llm.generate(
        [PROMPT, PROMPT[:7]], [SamplingParams(logprobs=3, max_tokens=4), SamplingParams(max_tokens=4)]
    )
    assert len(asked.logprobs) == len(asked.token_ids)
    assert not_asked.logprobs == ()


@pytest.mark.parametrize(
    ("prompt", "sampling", "field"),
    [
        ([], {}, "prompt"),
        ("", {}, "prompt"),
        ([1] * 256, {}, "prompt"),
        ([1, 331], {}, "prompt"),
        ([1, -1], {}, "prompt"),
        ([True], {}, "prompt"),
        ([1], {"stop_token_ids": (331,)}, "sampling.stop_token_ids"),
        ([1], {"logit_bias": {400: 1.0}}, "sampling.logit_bias"),
    ],
)
def test_bad_requests_name_the_field_and_leave_nothing(
    llm: LLM, prompt: list[int], sampling: dict[str, object], field: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        llm.add_request("bad", prompt, SamplingParams(**sampling))  # type: ignore[arg-type]
    assert [violation.field for violation in caught.value.violations] == [field]
    assert not llm.has_unfinished


def test_the_longest_prompt_gets_one_token(make_llm: MakeLLM) -> None:
    llm = make_llm(max_model_len=32)
    (completion,) = llm.generate([[9] * 31], SamplingParams(temperature=0, ignore_eos=True))
    assert (completion.usage.completion_tokens, completion.finish_reason) == (1, FinishReason.CONTEXT_FULL)


def test_a_request_id_in_use_is_refused(llm: LLM) -> None:
    llm.add_request("twice", PROMPT)
    with pytest.raises(InvalidRequestError, match="in use"):
        llm.add_request("twice", PROMPT)
    llm.abort("twice")


def test_a_full_queue_refuses_and_says_when_to_come_back(make_llm: MakeLLM) -> None:
    llm = make_llm(max_num_seqs=1, max_waiting=2)
    for i in range(3):
        llm.add_request(str(i), PROMPT)
    with pytest.raises(QueueFullError) as caught:
        llm.add_request("3", PROMPT)
    assert caught.value.retry_after_s > 0
    llm.abort("1")
    llm.add_request("3", PROMPT)
    for i in range(4):
        llm.abort(str(i))


def test_more_prompts_than_the_queue_holds(make_llm: MakeLLM) -> None:
    llm = make_llm(max_num_seqs=2, max_waiting=0)
    completions = llm.generate([[i, i + 1] for i in range(10, 19)], SamplingParams(temperature=0, max_tokens=3))
    assert [completion.prompt_token_ids for completion in completions] == [(i, i + 1) for i in range(10, 19)]


def test_all_blocks_come_back_and_the_counters_add_up(llm: LLM) -> None:
    before = llm.stats
    assert before.num_running == before.num_waiting == 0
    assert before.num_free_kv_blocks == before.num_kv_blocks
    run(llm)
    after = llm.stats
    assert after.num_free_kv_blocks == after.num_kv_blocks
    assert after.num_finished == before.num_finished + 1
    assert after.prompt_tokens == before.prompt_tokens + len(PROMPT)


def test_default_sampling_is_what_the_makers_recommend(tmp_path: Path, llm: LLM) -> None:
    recommended = {"temperature": 0.6, "top_p": 0.9, "eos_token_id": 2}
    path = write_hf(tmp_path / "model", TinyModel(), generation_config=recommended)
    assert LLM(str(path), EngineConfig(backend="cpu")).default_sampling == SamplingParams(temperature=0.6, top_p=0.9)
    assert llm.default_sampling == SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)


def test_warm_up_leaves_no_trace(tiny_path: Path) -> None:
    llm = LLM(str(tiny_path), EngineConfig(backend="cpu"))
    fresh = llm.stats
    llm.warm_up()
    assert llm.stats == fresh


GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def test_two_streams_side_by_side_lose_nothing(llm: LLM) -> None:
    prompts = [PROMPT, PROMPT[:7]]
    alone = [completion.token_ids for completion in llm.generate(prompts, GREEDY)]
    pairs = list(zip(*(llm.stream(prompt, GREEDY) for prompt in prompts), strict=True))
    assert [tuple(i for output in outputs for i in output.token_ids) for outputs in zip(*pairs, strict=True)] == alone


def test_generate_while_a_stream_and_a_request_are_open(llm: LLM) -> None:
    first, second = (completion.token_ids for completion in llm.generate([PROMPT, PROMPT[:7]], GREEDY))
    llm.add_request("own", PROMPT, GREEDY)
    stream = llm.stream(PROMPT, GREEDY)
    start = next(stream).token_ids
    assert llm.generate(PROMPT[:7], GREEDY)[0].token_ids == second
    assert start + tuple(i for output in stream for i in output.token_ids) == first
    outputs = []
    while llm.has_unfinished:
        outputs += llm.step()
    assert {output.request_id for output in outputs} == {"own"}
    assert tuple(i for output in outputs for i in output.token_ids) == first


@pytest.mark.parametrize("prompt", ["Once upon a time", PROMPT])
def test_a_lone_prompt_is_one_prompt(llm: LLM, prompt: str | list[int]) -> None:
    assert llm.generate(prompt, GREEDY)[0].token_ids == llm.generate([prompt], GREEDY)[0].token_ids  # type: ignore[list-item]
    assert len(llm.generate(prompt, GREEDY)) == 1


def test_a_second_thread_is_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    caught: list[BaseException] = []

    def intrude(*args: object) -> None:
        def enter() -> None:
            for call in (llm.step, lambda: llm.add_request("b", PROMPT), lambda: llm.abort("a")):
                with pytest.raises(RuntimeError, match="another thread") as error:
                    call()
                caught.append(error.value)

        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()

    llm.add_request("a", PROMPT, GREEDY)
    monkeypatch.setattr(llm.engine._scheduler, "commit", intrude)  # in the middle of a step
    llm.step()
    assert len(caught) == 3
    monkeypatch.undo()
    llm.abort("a")


def test_a_text_too_long_for_any_tokens_is_refused_before_it_is_tokenised(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest, context = llm._tokenizer.max_token_chars, llm.model_info.max_model_len
    assert longest is not None
    fits = "a" * (longest * context)
    with pytest.raises(InvalidRequestError, match="tokens, but the context holds"):
        llm.validate(fits, SamplingParams())
    monkeypatch.setattr(llm._tokenizer, "encode", None)
    with pytest.raises(InvalidRequestError, match=f"prompt: is {len(fits) + 1} characters, and the context of"):
        llm.validate(fits + "a", SamplingParams())
