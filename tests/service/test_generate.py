"""Generate: what streams, in which order, and how it ends."""

from __future__ import annotations

from typing import Any

import pytest

from numba_engine import SamplingParams
from numba_engine_api.v1 import inference_pb2 as api
from tests.service.conftest import Serve
from tests.service.fake_llm import END_TOKEN, FakeLLM


async def collect(call: Any) -> tuple[api.GenerationStarted, list[api.GenerationDelta], api.GenerationFinished]:
    """The three parts of a stream, whose order is checked."""
    events = [response async for response in call]
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds == ["started", *["delta"] * (len(kinds) - 2), "finished"]
    return events[0].started, [event.delta for event in events[1:-1]], events[-1].finished


def text_of(deltas: list[api.GenerationDelta]) -> str:
    return "".join(delta.text for delta in deltas)


async def test_text_ids_usage_and_timings_of_a_whole_stream(serve: Serve) -> None:
    async with serve() as served:
        request = api.GenerateRequest(prompt="añ🙂", sampling=api.SamplingParams(max_tokens=10), request_id="mine")
        started, deltas, finished = await collect(served.stub.Generate(request))
        echo = list("añ🙂".encode())

        assert (started.request_id, started.prompt_token_count, list(started.prompt_token_ids)) == ("mine", 7, [])
        assert text_of(deltas) == "añ🙂añ"
        assert [i for delta in deltas for i in delta.token_ids] == (echo * 2)[:10]
        assert finished.finish_reason == api.FINISH_REASON_MAX_TOKENS
        assert not finished.HasField("stop_sequence")
        assert not finished.HasField("stop_token_id")
        usage, timings = finished.usage, finished.timings
        assert (usage.prompt_tokens, usage.cached_prompt_tokens, usage.completion_tokens) == (7, 2, 10)
        assert (timings.queue_s, timings.ttft_s, timings.prefill_s, timings.decode_s) == (0.1, 0.2, 0.3, 0.4)
        assert (timings.mean_inter_token_s, timings.num_preemptions) == (0.5, 6)


async def test_the_three_kinds_of_input(serve: Serve) -> None:
    async with serve() as served:
        sampling = api.SamplingParams(max_tokens=6)
        chat = api.Chat(messages=[api.ChatMessage(role="user", content="hi"), api.ChatMessage(role="x", content="")])
        for given, echo in (
            ({"prompt": "ab"}, "ababab"),
            ({"token_ids": api.TokenIds(ids=b"xyz")}, "xyzxyz"),
            ({"chat": chat}, "user:h"),
        ):
            _, deltas, _ = await collect(served.stub.Generate(api.GenerateRequest(sampling=sampling, **given)))
            assert text_of(deltas) == echo


@pytest.mark.parametrize(
    ("sampling", "prompt", "reason", "stop_sequence", "stop_token_id", "text"),
    [
        ({"stop": ["c"]}, b"abcd", "STOP_SEQUENCE", "c", None, "ab"),
        ({}, bytes([97, 98]), "CONTEXT_FULL", None, None, "ab" * 31),
        ({"stop_token_ids": [99]}, b"abc", "STOP_TOKEN", None, 99, "ab"),
        ({"time_limit_s": 1e-9}, b"abc", "TIME_LIMIT", None, None, ""),
        ({"max_tokens": 1}, b"abc", "MAX_TOKENS", None, None, "a"),
    ],
)
async def test_each_finish_reason(
    serve: Serve,
    sampling: dict[str, Any],
    prompt: bytes,
    reason: str,
    stop_sequence: str | None,
    stop_token_id: int | None,
    text: str,
) -> None:
    async with serve(FakeLLM(max_model_len=64)) as served:
        request = api.GenerateRequest(token_ids=api.TokenIds(ids=prompt), sampling=api.SamplingParams(**sampling))
        _, deltas, finished = await collect(served.stub.Generate(request))
        assert api.FinishReason.Name(finished.finish_reason) == f"FINISH_REASON_{reason}"
        assert (finished.stop_sequence if finished.HasField("stop_sequence") else None) == stop_sequence
        assert (finished.stop_token_id if finished.HasField("stop_token_id") else None) == stop_token_id
        assert text_of(deltas) == text


async def test_the_model_s_end_token(serve: Serve) -> None:
    async with serve() as served:
        request = api.GenerateRequest(token_ids=api.TokenIds(ids=[65, END_TOKEN]))
        _, deltas, finished = await collect(served.stub.Generate(request))
        assert finished.finish_reason == api.FINISH_REASON_STOP_TOKEN
        assert finished.stop_token_id == END_TOKEN
        assert text_of(deltas) == "A"


async def test_token_ids_on_request_and_off(serve: Serve) -> None:
    async with serve() as served:
        request = api.GenerateRequest(
            prompt="é",
            sampling=api.SamplingParams(max_tokens=2),
            include_prompt_token_ids=True,
            include_token_ids=False,
        )
        started, deltas, finished = await collect(served.stub.Generate(request))
        assert list(started.prompt_token_ids) == list("é".encode())
        assert [(delta.text, list(delta.token_ids)) for delta in deltas] == [("é", [])]
        assert finished.usage.completion_tokens == 2


async def test_logprobs(serve: Serve) -> None:
    async with serve() as served:
        request = api.GenerateRequest(prompt="ab", sampling=api.SamplingParams(max_tokens=3, logprobs=2))
        _, deltas, _ = await collect(served.stub.Generate(request))
        positions = [position for delta in deltas for position in delta.logprobs]
        assert [(p.chosen.token_id, p.chosen.logprob, p.chosen.text) for p in positions] == [
            (97, -0.5, "a"),
            (98, -0.5, "b"),
            (97, -0.5, "a"),
        ]
        assert [(t.token_id, t.logprob, t.text) for t in positions[0].top] == [(0, 0.0, "a"), (1, -1.5, "b")]


async def test_an_unset_scalar_is_the_model_s_and_a_zero_is_a_zero(serve: Serve) -> None:
    llm = FakeLLM(default_sampling=SamplingParams(temperature=0.6, top_k=20, top_p=0.9, presence_penalty=0.5))
    async with serve(llm) as served:
        sampling = api.SamplingParams(
            top_k=0,
            presence_penalty=0,
            seed=2**64 - 1,
            max_tokens=1,
            logit_bias={5: -1.5},
            stop=["x", "yz"],
            stop_token_ids=[7],
            ignore_eos=True,
            min_p=0.1,
        )
        await collect(served.stub.Generate(api.GenerateRequest(prompt="a", sampling=sampling)))
        assert llm.seen_params == [
            SamplingParams(
                temperature=0.6,
                top_k=0,
                top_p=0.9,
                min_p=0.1,
                presence_penalty=0.0,
                seed=2**64 - 1,
                max_tokens=1,
                logit_bias={5: -1.5},
                stop=("x", "yz"),
                stop_token_ids=(7,),
                ignore_eos=True,
            )
        ]


async def test_deltas_come_as_steps_are_made(serve: Serve) -> None:
    async with serve(FakeLLM(gated=True)) as served:
        call = served.stub.Generate(api.GenerateRequest(prompt="abc", sampling=api.SamplingParams(max_tokens=3)))
        assert (await call.read()).started.prompt_token_count == 3
        for letter in "abc":
            served.llm.allow(1)
            assert (await call.read()).delta.text == letter
        assert (await call.read()).finished.finish_reason == api.FINISH_REASON_MAX_TOKENS
