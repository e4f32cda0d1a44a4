"""Long texts do not hold up short ones, nor the end of the server; and there is an end to how long they may be."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import grpc
import pytest

from numba_engine_api.v1 import inference_pb2 as api
from service.text_threads import TextThreads
from tests.service.conftest import PATIENCE_S, Serve, Served
from tests.service.fake_llm import FakeLLM
from tests.service.test_errors import details_of, failure_of, generate, violations

LONG = "x" * 100_000


class SlowTexts(FakeLLM):
    """Takes for a long text until it is told to go on."""

    def __init__(self) -> None:
        super().__init__(max_model_len=10**6)
        self.entered, self.go_on = threading.Semaphore(0), threading.Event()

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if len(text) >= len(LONG):
            self.entered.release()
            self.go_on.wait(PATIENCE_S)
        return super().tokenize(text)


def tokenize(served: Served, text: str) -> asyncio.Future[api.TokenizeResponse]:
    return asyncio.ensure_future(served.stub.Tokenize(api.TokenizeRequest(text=text)))


async def test_a_short_request_does_not_wait_for_long_texts(serve: Serve) -> None:
    llm = SlowTexts()
    async with serve(llm) as served:
        floods = [tokenize(served, LONG) for _ in range(20)]
        await asyncio.to_thread(llm.entered.acquire, timeout=PATIENCE_S)
        events = [event async for event in served.stub.Generate(generate("ab", max_tokens=2))]
        assert "".join(event.delta.text for event in events) == "ab"
        assert not any(flood.done() for flood in floods)
        llm.go_on.set()
        assert {len(reply.token_ids) for reply in await asyncio.gather(*floods)} == {len(LONG)}


@pytest.mark.parametrize(
    ("method", "request_", "field"),
    [
        ("Generate", generate("x" * 2049), "prompt"),
        (
            "Generate",
            api.GenerateRequest(chat=api.Chat(messages=[api.ChatMessage(content="x" * 2048)])),
            "chat.messages",
        ),
        ("Profile", api.ProfileRequest(prompt="é" * 1025), "prompt"),
        ("Tokenize", api.TokenizeRequest(text="x" * 2049), "text"),
        ("Tokenize", api.TokenizeRequest(chat=api.Chat(messages=[api.ChatMessage()] * 1025)), "chat.messages"),
        ("Detokenize", api.DetokenizeRequest(token_ids=[1] * 513), "token_ids"),
        ("EstimateThroughput", api.EstimateThroughputRequest(config_json="x" * 2049), "config_json"),
    ],
)
async def test_a_text_that_is_too_long_is_not_looked_at(serve: Serve, method: str, request_: Any, field: str) -> None:
    llm = FakeLLM()
    llm.in_tokenize = lambda: pytest.fail("tokenised")
    async with serve(llm, max_text_bytes=2048) as served:
        error = await failure_of(getattr(served.stub, method)(request_))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert list(violations(error)) == [field]
        assert "one call may have" in violations(error)[field]


async def test_what_waits_of_long_texts_is_bounded(serve: Serve) -> None:
    llm = SlowTexts()
    async with serve(llm, max_text_bytes=len(LONG)) as served:
        held = [tokenize(served, LONG) for _ in range(8)]
        await asyncio.to_thread(llm.entered.acquire, timeout=PATIENCE_S)
        refused = [await failure_of(tokenize(served, LONG)) for _ in range(2)]
        for error in refused:
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert details_of(error)["ErrorInfo"].reason == "TEXTS_FULL"
            assert details_of(error)["RetryInfo"].retry_delay.ToMilliseconds() > 0
        assert (await tokenize(served, "é")).token_ids == [195, 169]
        llm.go_on.set()
        assert (
            sum(isinstance(r, api.TokenizeResponse) for r in await asyncio.gather(*held, return_exceptions=True)) == 7
        )
        assert len((await tokenize(served, LONG)).token_ids) == len(LONG), "there is room again"


@pytest.mark.parametrize("unit", [1, 2**9, 2**12])
async def test_the_smaller_goes_first_and_a_cancelled_one_never_starts(unit: int) -> None:
    threads = TextThreads(max_waiting_bytes=2**30)
    entered, go_on, order = threading.Event(), threading.Event(), list[int]()

    def hold() -> None:
        entered.set()
        go_on.wait(PATIENCE_S)

    def run(num_bytes: int) -> asyncio.Task[None]:
        return asyncio.create_task(threads.run(lambda: order.append(num_bytes), num_bytes))

    first = asyncio.create_task(threads.run(hold, 50 * unit))
    await asyncio.to_thread(entered.wait, PATIENCE_S)
    waiting = [run(size * unit) for size in (90, 80, 20, 50)]
    await asyncio.sleep(0)
    waiting[-1].cancel()
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(first, *waiting, return_exceptions=True)
    assert order == [20 * unit, 80 * unit, 90 * unit]


async def test_draining_waits_for_texts_too(serve: Serve) -> None:
    llm = SlowTexts()
    async with serve(llm) as served:
        call = tokenize(served, LONG)
        await asyncio.to_thread(llm.entered.acquire, timeout=PATIENCE_S)
        served.server.closing.set()
        await served.until(lambda status: status.state == api.SERVER_STATE_DRAINING)
        assert (await failure_of(tokenize(served, "a"))).code() is grpc.StatusCode.UNAVAILABLE
        llm.go_on.set()
        assert len((await call).token_ids) == len(LONG)
        assert await asyncio.wait_for(served.exit_code, PATIENCE_S) == 0
