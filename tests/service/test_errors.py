"""Every error has its status, its details and its counter; none shows the server's insides."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from numba_engine import NumbaEngineError, RequestOutput
from numba_engine_api.v1 import inference_pb2 as api
from service import translate
from tests.service.conftest import PATIENCE_S, Serve, rest_of
from tests.service.fake_llm import FakeLLM

DETAILS = {
    cls.DESCRIPTOR.full_name: cls
    for cls in (
        error_details_pb2.BadRequest,
        error_details_pb2.ErrorInfo,
        error_details_pb2.RetryInfo,
        error_details_pb2.RequestInfo,
    )
}


def details_of(error: grpc.aio.AioRpcError) -> dict[str, Any]:
    """The google.rpc details of an error by the name of their type."""
    status = rpc_status.from_call(error)
    assert status is not None, f"no details with {error!r}"
    assert (status.code, status.message) == (error.code().value[0], error.details())
    found = {}
    for packed in status.details:
        name = packed.TypeName()
        found[name.rpartition(".")[2]] = DETAILS[name].FromString(packed.value)
    assert found["ErrorInfo"].domain == "numba-engine"
    return found


async def failure_of(call: Any) -> grpc.aio.AioRpcError:
    answer = _whole(call) if hasattr(call, "read") else call
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer
    return caught.value


async def _whole(call: Any) -> list[Any]:
    return [response async for response in rest_of(call)]


def violations(error: grpc.aio.AioRpcError) -> dict[str, str]:
    return {v.field: v.description for v in details_of(error)["BadRequest"].field_violations}


def generate(prompt: str = "ab", request_id: str = "", **sampling: Any) -> api.GenerateRequest:
    return api.GenerateRequest(prompt=prompt, request_id=request_id, sampling=api.SamplingParams(**sampling))


@pytest.mark.parametrize(
    ("request_", "fields"),
    [
        (generate(temperature=-1, top_p=0), {"sampling.temperature", "sampling.top_p"}),
        (generate(temperature=float("nan")), {"sampling.temperature"}),
        (generate(min_p=1.5), {"sampling.min_p"}),
        (generate(repetition_penalty=0), {"sampling.repetition_penalty"}),
        (generate(presence_penalty=3), {"sampling.presence_penalty"}),
        (generate(frequency_penalty=-3), {"sampling.frequency_penalty"}),
        (generate(logit_bias={1: 101}), {"sampling.logit_bias"}),
        (generate(max_tokens=0), {"sampling.max_tokens"}),
        (generate(stop=[""]), {"sampling.stop"}),
        (generate(stop_token_ids=[300]), {"sampling.stop_token_ids"}),
        (generate(logprobs=21), {"sampling.logprobs"}),
        (generate(time_limit_s=0), {"sampling.time_limit_s"}),
        (generate(request_id="a b"), {"request_id"}),
        (generate(request_id="x" * 129), {"request_id"}),
        (api.GenerateRequest(), {"input"}),
        (generate(prompt=""), {"prompt"}),
        (api.GenerateRequest(token_ids=api.TokenIds()), {"token_ids.ids"}),
        (api.GenerateRequest(token_ids=api.TokenIds(ids=[257])), {"token_ids.ids"}),
        (api.GenerateRequest(chat=api.Chat()), {"chat.messages"}),
        (
            api.GenerateRequest(chat=api.Chat(messages=[api.ChatMessage(role="user"), api.ChatMessage(content="x")])),
            {"chat.messages[1].role"},
        ),
    ],
)
async def test_invalid_requests_name_their_fields(
    serve: Serve, request_: api.GenerateRequest, fields: set[str]
) -> None:
    async with serve() as served:
        error = await failure_of(served.stub.Generate(request_))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert set(violations(error)) == fields
        assert details_of(error)["ErrorInfo"].reason == "INVALID_REQUEST"
        assert details_of(error)["RequestInfo"].request_id
        counters = (await served.status()).counters
        assert (counters.received, counters.invalid, counters.in_flight) == (1, 1, 0)


async def test_a_profile_names_its_own_fields(serve: Serve) -> None:
    async with serve() as served:
        error = await failure_of(served.stub.Profile(api.ProfileRequest(prompt="a", num_tokens=0)))
        assert set(violations(error)) == {"num_tokens"}
        error = await failure_of(served.stub.Profile(api.ProfileRequest()))
        assert violations(error) == {"input": "one of prompt, token_ids, chat, synthetic, live is required"}


async def test_text_rpcs_name_their_fields(serve: Serve) -> None:
    async with serve() as served:
        error = await failure_of(served.stub.Tokenize(api.TokenizeRequest()))
        assert violations(error) == {"input": "one of text, chat is required"}
        error = await failure_of(served.stub.Tokenize(api.TokenizeRequest(chat=api.Chat())))
        assert set(violations(error)) == {"chat.messages"}
        error = await failure_of(served.stub.Detokenize(api.DetokenizeRequest(token_ids=[1, 257])))
        assert violations(error) == {"token_ids": "is not in the vocabulary"}
        error = await failure_of(served.stub.Abort(api.AbortRequest()))
        assert set(violations(error)) == {"request_id"}
        assert (await served.status()).counters.received == 0, "counters are of Generate and Profile"


async def test_a_chat_without_a_template(serve: Serve) -> None:
    async with serve(FakeLLM(has_chat_template=False)) as served:
        chat = api.Chat(messages=[api.ChatMessage(role="user", content="hi")])
        for call in (
            served.stub.Generate(api.GenerateRequest(chat=chat)),
            served.stub.Tokenize(api.TokenizeRequest(chat=chat)),
        ):
            error = await failure_of(call)
            assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert details_of(error)["ErrorInfo"].reason == "NO_CHAT_TEMPLATE"
            assert "send `prompt` or `token_ids`" in error.details()


async def test_a_running_id_cannot_be_used_twice(serve: Serve) -> None:
    async with serve(FakeLLM(gated=True)) as served:
        first = served.stub.Generate(generate(request_id="same", max_tokens=1))
        await first.read()
        error = await failure_of(served.stub.Generate(generate(request_id="same", max_tokens=1)))
        assert error.code() is grpc.StatusCode.ALREADY_EXISTS
        assert details_of(error)["ErrorInfo"].reason == "DUPLICATE_REQUEST_ID"
        assert details_of(error)["RequestInfo"].request_id == "same"
        served.llm.open_gate()
        assert [event.WhichOneof("event") async for event in rest_of(first)] == ["delta", "finished"]
        # The id is free again.
        again = [event.WhichOneof("event") async for event in served.stub.Generate(generate("a", "same", max_tokens=1))]
        assert again == ["started", "delta", "finished"]


async def test_a_flood_past_the_queue_is_refused_and_the_rest_is_served(serve: Serve) -> None:
    async with serve(FakeLLM(gated=True, max_num_seqs=4, max_waiting=8)) as served:

        async def text() -> str:
            call = served.stub.Generate(generate(max_tokens=500))
            return "".join([event.delta.text async for event in call])

        calls = [asyncio.create_task(text()) for _ in range(40)]
        await served.step_until(lambda status: status.counters.rejected == 28)
        served.llm.open_gate()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert results.count("ab" * 250) == 12
        errors = [result for result in results if isinstance(result, grpc.aio.AioRpcError)]
        assert len(errors) == 28
        for error in errors:
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert details_of(error)["ErrorInfo"].reason == "QUEUE_FULL"
        # A place gets free every 1.5 s: the first is told that, each further one a later time, up to a minute or so.
        hints = sorted(details_of(error)["RetryInfo"].retry_delay.ToMilliseconds() for error in errors)
        assert 1500 <= hints[0] <= 2250
        assert 28 * 1500 - 1000 <= hints[-1] <= 28 * 2250
        assert all(sum(hint <= 1500 * place for hint in hints) <= place for place in range(1, 29)), "never a herd"
        assert await text() == "ab" * 250
        status = await served.status()
        assert (status.counters.finished, status.counters.in_flight) == (13, 0)


async def test_calls_in_flight_are_bounded_before_the_engine(serve: Serve) -> None:
    llm = FakeLLM()
    entered, release = threading.Semaphore(0), threading.Event()

    def hold() -> None:
        entered.release()
        release.wait(PATIENCE_S)

    llm.in_tokenize = hold
    async with serve(llm, max_in_flight=2) as served:
        texts = ["a", "a" * 20_000]  # one for each of the threads
        held = [asyncio.ensure_future(served.stub.Tokenize(api.TokenizeRequest(text=text))) for text in texts]
        for _ in held:
            await asyncio.to_thread(entered.acquire, timeout=PATIENCE_S)
        error = await failure_of(served.stub.Generate(generate(max_tokens=1)))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert details_of(error)["RetryInfo"].retry_delay.ToMilliseconds() > 0
        assert (await served.status()).state == api.SERVER_STATE_READY
        release.set()
        assert ["".join(map(chr, reply.token_ids)) for reply in await asyncio.gather(*held)] == texts


async def test_a_message_that_is_too_large(serve: Serve) -> None:
    async with serve(max_message_bytes=2**16) as served:
        error = await failure_of(served.stub.Generate(generate("x" * 2**16)))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    "request_",
    [
        generate(stop=["é" * 2**20]),
        generate(stop=["\n" * 1000] * 1000),
        generate(request_id="é" * 2**20),
        generate(**dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"), -1e300)),
        api.GenerateRequest(chat=api.Chat(messages=[api.ChatMessage()] * 10_000)),
    ],
)
async def test_an_error_fits_into_trailers_however_long_what_it_quotes(
    serve: Serve, request_: api.GenerateRequest
) -> None:
    async with serve() as served:
        error = await failure_of(served.stub.Generate(request_))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert 1 <= len(violations(error)) <= 8
        trailers = error.trailing_metadata()
        assert sum(len(key) + len(value) for key, value in trailers) < 4096
        assert len(error.details().encode()) <= 512


async def test_an_empty_text_is_the_tokenizer_s_to_judge(serve: Serve) -> None:
    """Of a model that begins texts with a token, the empty text is a prompt."""
    llm = FakeLLM()
    llm.tokenize = lambda text, *, add_special_tokens=True: [65, *text.encode()]  # type: ignore[method-assign]
    async with serve(llm) as served:
        events = [event async for event in served.stub.Generate(generate("", max_tokens=2))]
        assert "".join(event.delta.text for event in events) == "AA"


async def test_a_request_that_can_choose_no_token_ends_alone(serve: Serve) -> None:
    """What was generated comes first; the message says what to do; others go on."""

    class NoThirdToken(FakeLLM):
        def step(self) -> list[RequestOutput]:
            return [self._failed(output) for output in super().step()]

        def _failed(self, output: RequestOutput) -> RequestOutput:
            if output.request_id != "bad" or output.usage.completion_tokens < 3:
                return output
            self.abort("bad")
            return replace(output, text="", token_ids=(), finish_reason=None, error="try --kv-cache-dtype float32")

    async with serve(NoThirdToken()) as served:
        other = asyncio.create_task(_whole(served.stub.Generate(generate("xy", max_tokens=9))))
        call = served.stub.Generate(generate("abcdef", request_id="bad", max_tokens=9))
        texts: list[str] = []

        async def read() -> None:
            async for response in call:
                texts.append(response.delta.text)

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read()
        assert "".join(texts) == "ab"
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert caught.value.details() == "try --kv-cache-dtype float32"
        assert details_of(caught.value)["ErrorInfo"].reason == "NON_FINITE_LOGITS"
        assert sum(len(response.delta.token_ids) for response in await other) == 9
        counters = (await served.status()).counters
        assert (counters.failed, counters.finished) == (1, 1)


async def test_a_bug_is_told_by_its_id_alone(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    llm = FakeLLM()
    async with serve(llm) as served:
        llm.fail_in_add = TypeError("secret: unsupported operand")
        error = await failure_of(served.stub.Generate(generate(request_id="buggy")))
        assert error.code() is grpc.StatusCode.INTERNAL
        assert error.details() == "internal error; the server's log has it under request id buggy"
        assert details_of(error)["RequestInfo"].request_id == "buggy"
        assert "secret" not in repr(error)
        assert "Traceback" not in repr(error)
        assert [r.exc_info[1] for r in caplog.records if r.exc_info] == [llm.fail_in_add]
        # The other requests go on.
        llm.fail_in_add = None
        assert len([_ async for _ in served.stub.Generate(generate(max_tokens=1))]) == 3
        assert (await served.status()).counters.failed == 1


async def test_a_bug_in_a_text_function(serve: Serve) -> None:
    llm = FakeLLM()

    def fail() -> None:
        raise ZeroDivisionError("secret")

    llm.in_tokenize = fail
    async with serve(llm) as served:
        for call in (served.stub.Tokenize(api.TokenizeRequest(text="a")), served.stub.Generate(generate())):
            error = await failure_of(call)
            assert error.code() is grpc.StatusCode.INTERNAL
            assert details_of(error)["RequestInfo"].request_id in error.details()
            assert "secret" not in repr(error)


def test_the_table_knows_every_error() -> None:
    """A new class of errors needs a place in the table, or clients would be told of a bug."""

    def all_below(cls: type[Exception]) -> set[type[Exception]]:
        return {cls, *(sub for direct in cls.__subclasses__() for sub in all_below(direct))}

    ours = {
        cls for cls in all_below(NumbaEngineError) if cls.__module__.partition(".")[0] in ("numba_engine", "service")
    }
    mapped = {cls for cls in ours if any(base in translate.KINDS for base in cls.__mro__)}
    assert ours - mapped == {NumbaEngineError}
