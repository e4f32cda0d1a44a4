"""Client and AsyncClient against a server whose answers are known: both must say the same."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
import trustme
from google.rpc import code_pb2

from numba_engine_api.v1 import inference_pb2 as pb
from numba_engine_client import (
    AsyncClient,
    Client,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    Retry,
    ServerError,
    UnavailableError,
    UnimplementedError,
)
from numba_engine_client.errors import ErrorDetails
from tests.clients import fake_service as fake
from tests.clients.fake_service import FakeService, serving


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def target(service: FakeService) -> Iterator[str]:
    with serving(service) as target:
        yield target


@pytest.fixture
def client(target: str) -> Iterator[Client]:
    with Client(target, timeout=20) as client:
        yield client


# ---- generate ------------------------------------------------------------------------------------------------------


def test_generate_streams_deltas_and_gathers_them(service: FakeService, client: Client) -> None:
    service.behaviours["Generate"] = fake.answer("Paris", "", " 🎉")
    stream = client.generate("The capital of France is", include_prompt_token_ids=True)
    with pytest.raises(RuntimeError, match="has not finished"):
        _ = stream.result

    assert [delta.text for delta in stream] == ["Paris", "", " 🎉"]
    result = stream.result
    assert (result.text, result.token_ids) == ("Paris 🎉", (10, 11, 12))
    assert (stream.request_id, result.prompt_token_ids, result.prompt_token_count) == ("req-1", (1, 2, 3, 4, 5), 5)
    assert (result.finish_reason, result.stop_sequence, result.stop_token_id) == ("max_tokens", None, None)
    assert (result.usage, result.timings) == (fake.USAGE, fake.TIMINGS)


async def test_async_generate_streams_deltas_and_gathers_them(service: FakeService, target: str) -> None:
    service.behaviours["Generate"] = fake.answer("Paris", "", " 🎉")
    async with AsyncClient(target, timeout=20) as client:
        stream = client.generate("The capital of France is")
        assert [delta.text async for delta in stream] == ["Paris", "", " 🎉"]
        assert (stream.result.text, stream.result.token_ids, stream.request_id) == ("Paris 🎉", (10, 11, 12), "req-1")
        assert await client.generate_text("again") == "Paris 🎉"


def test_request_carries_what_was_given_and_nothing_else(service: FakeService, client: Client) -> None:
    service.behaviours["Generate"] = fake.answer("x")
    client.generate_text("p", request_id="mine", temperature=0, top_k=0, stop="\n", logit_bias={7: -2}, seed=2**64 - 1)
    client.generate_text(token_ids=[3, 1], stop=["a", "b"], stop_token_ids=[9], ignore_eos=False, max_tokens=None)
    client.generate_text(messages="hello")
    client.generate_text(messages=[{"role": "system", "content": "s"}, {"role": "user", "content": "u"}])

    first, second, third, fourth = service.requests
    assert (first.prompt, first.request_id) == ("p", "mine")
    sampling = first.sampling
    assert sampling.HasField("temperature")
    assert sampling.HasField("top_k"), "zero is not the same as unset"
    assert not sampling.HasField("top_p")
    assert not sampling.HasField("max_tokens")
    assert (list(sampling.stop), dict(sampling.logit_bias), sampling.seed) == (["\n"], {7: -2}, 2**64 - 1)
    assert list(second.token_ids.ids) == [3, 1]
    assert (list(second.sampling.stop), list(second.sampling.stop_token_ids)) == (["a", "b"], [9])
    assert second.sampling.HasField("ignore_eos")
    assert not second.sampling.HasField("max_tokens")
    assert [(m.role, m.content) for m in third.chat.messages] == [("user", "hello")]
    assert [(m.role, m.content) for m in fourth.chat.messages] == [("system", "s"), ("user", "u")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "exactly one of prompt, token_ids and messages"),
        ({"prompt": "a", "messages": "b"}, "exactly one of"),
        ({"prompt": "a", "top_k": -1}, "top_k = -1"),
        ({"prompt": "a", "temperature": "hot"}, "temperature = 'hot'"),
        ({"prompt": "a", "heat": 1}, "'heat' is no sampling parameter"),
    ],
)
def test_arguments_that_no_request_can_carry(client: Client, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        client.generate(**arguments)


def test_stop_sequence_and_token_and_logprobs_are_told(service: FakeService, client: Client) -> None:
    chosen = pb.TokenLogprob(token_id=10, logprob=-0.5, text="a")
    position = pb.PositionLogprobs(chosen=chosen, top=[chosen, pb.TokenLogprob(token_id=4, logprob=-1.5, text="b")])

    def generate(request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:
        yield fake.started()
        yield fake.delta("a", 10, logprobs=(position,))
        if request.prompt == "sequence":
            yield fake.finished(pb.FINISH_REASON_STOP_SEQUENCE, stop_sequence="\n\n")
        else:
            yield fake.finished(pb.FINISH_REASON_STOP_TOKEN, stop_token_id=0)

    service.behaviours["Generate"] = generate
    by_sequence = client.generate("sequence").read()
    by_token = client.generate("token").read()
    assert (by_sequence.finish_reason, by_sequence.stop_sequence) == ("stop_sequence", "\n\n")
    assert (by_sequence.stop_token_id, by_sequence.logprobs) == (None, (position,))
    assert (by_token.finish_reason, by_token.stop_token_id) == ("stop_token", 0)


def test_finish_reason_of_a_newer_server(service: FakeService, client: Client) -> None:
    service.behaviours["Generate"] = lambda request, context: iter([fake.started(), fake.finished(99)])
    assert client.generate("p").read().finish_reason == "unspecified"


# ---- leaving early -------------------------------------------------------------------------------------------------


def test_close_cancels_the_call(service: FakeService, client: Client) -> None:
    service.behaviours["Generate"] = fake.endless
    with client.generate("p") as stream:
        assert next(stream).text == "0 "
    assert service.cancelled.wait(5)
    assert list(stream) == [], "a closed stream has nothing more to say"
    assert stream.text.startswith("0 ")


def test_a_forgotten_stream_is_cancelled(service: FakeService, client: Client) -> None:
    service.behaviours["Generate"] = fake.endless
    gc.disable()  # so that it must go by reference count alone
    try:
        for delta in client.generate("p"):
            assert delta.text == "0 "
            break
        assert service.cancelled.wait(5)
    finally:
        gc.enable()


def test_close_from_another_thread_ends_the_reader(service: FakeService, client: Client) -> None:
    service.behaviours["Generate"] = fake.endless
    stream = client.generate("p")
    threading.Timer(0.1, stream.close).start()
    count = sum(1 for _ in stream)
    assert 0 < count < 1000
    assert service.cancelled.wait(5)


async def test_async_close_cancels_the_call(service: FakeService, target: str) -> None:
    service.behaviours["Generate"] = fake.endless
    async with AsyncClient(target) as client:
        async with client.generate("p") as stream:
            assert (await anext(stream)).text == "0 "
        assert await asyncio.to_thread(service.cancelled.wait, 5)
        assert [delta async for delta in stream] == []


async def test_async_close_from_another_task_ends_the_reader(service: FakeService, target: str) -> None:
    service.behaviours["Generate"] = fake.endless
    async with AsyncClient(target) as client:
        stream = client.generate("p")
        asyncio.get_running_loop().call_later(0.1, stream.close)
        texts = [delta.text async for delta in stream]
        assert 0 < len(texts) < 1000


async def test_cancelled_task_cancels_the_call(service: FakeService, target: str) -> None:
    service.behaviours["Generate"] = fake.endless
    async with AsyncClient(target) as client:
        task = asyncio.create_task(client.generate_text("p"))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(service.cancelled.wait, 5)


# ---- errors --------------------------------------------------------------------------------------------------------


def test_field_violations_and_request_id(service: FakeService, client: Client) -> None:
    service.behaviours["Generate"] = lambda request, context: fake.refuse_field(context, "sampling.top_p", "too low")
    with pytest.raises(InvalidRequestError) as caught:
        client.generate_text("p", top_p=0)
    error = caught.value
    assert [(v.field, v.description) for v in error.violations] == [("sampling.top_p", "too low")]
    assert (error.code, error.request_id, error.retry_delay_s) == (grpc.StatusCode.INVALID_ARGUMENT, "req-17", None)
    assert str(error) == "INVALID_ARGUMENT: sampling.top_p: too low"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (code_pb2.FAILED_PRECONDITION, FailedPreconditionError),
        (code_pb2.NOT_FOUND, NotFoundError),
        (code_pb2.RESOURCE_EXHAUSTED, OverloadedError),
        (code_pb2.UNAVAILABLE, UnavailableError),
        (code_pb2.UNIMPLEMENTED, UnimplementedError),
        (code_pb2.INTERNAL, ServerError),
        (code_pb2.DATA_LOSS, ServerError),
    ],
)
async def test_every_status_has_its_exception(service: FakeService, target: str, code: int, kind: type) -> None:
    service.behaviours["Abort"] = lambda request, context: fake.refuse(context, code, "because")
    with Client(target) as client, pytest.raises(kind, match="because"):
        client.abort("x")
    async with AsyncClient(target) as async_client:
        with pytest.raises(kind, match="because"):
            await async_client.abort("x")


def _breaks(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
    yield fake.started()
    yield fake.delta("half a ", 1, 2)
    yield fake.delta("sentence", 3)
    fake.refuse(context, code_pb2.UNAVAILABLE, "shutting down")


async def test_broken_stream_keeps_the_partial_text(service: FakeService, target: str) -> None:
    service.behaviours["Generate"] = _breaks
    with Client(target, retry=Retry(attempts=3)) as client, pytest.raises(UnavailableError) as caught:
        client.generate_text("p")
    assert (caught.value.partial_text, caught.value.token_ids) == ("half a sentence", (1, 2, 3))
    async with AsyncClient(target) as async_client:
        with pytest.raises(UnavailableError) as caught:
            await async_client.generate_text("p")
    assert (caught.value.partial_text, caught.value.token_ids) == ("half a sentence", (1, 2, 3))


async def test_stream_that_ends_before_its_last_message(service: FakeService, target: str) -> None:
    service.behaviours["Generate"] = lambda request, context: iter([fake.started(), fake.delta("half", 1)])
    with Client(target) as client, pytest.raises(ServerError, match="before its last message") as caught:
        client.generate_text("p")
    assert caught.value.partial_text == "half"
    async with AsyncClient(target) as async_client:
        with pytest.raises(ServerError, match="before its last message"):
            await async_client.generate_text("p")


def test_deadline_keeps_the_partial_text(service: FakeService, client: Client) -> None:
    service.behaviours["Generate"] = fake.endless
    before = time.monotonic()
    with pytest.raises(DeadlineExceededError) as caught:
        client.generate_text("p", timeout=0.3)
    assert time.monotonic() - before < 5
    assert caught.value.partial_text.startswith("0 1 ")


def test_nobody_listens(service: FakeService) -> None:
    with Client(f"127.0.0.1:{_closed_port()}") as client, pytest.raises(UnavailableError):
        client.status()


# ---- retry ---------------------------------------------------------------------------------------------------------


def _full_at_first(times: int, retry_delay_s: float) -> Any:
    refused = 0

    def generate(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        nonlocal refused
        if refused < times:
            refused += 1
            fake.refuse_full(context, retry_delay_s)
        yield from fake.answer("finally")(request, context)

    return generate


async def test_full_server_is_tried_again_after_the_delay_it_asks_for(service: FakeService, target: str) -> None:
    retry = Retry(attempts=3)
    service.behaviours["Generate"] = _full_at_first(2, 0.05)
    before = time.monotonic()
    with Client(target, retry=retry) as client:
        assert client.generate_text("p") == "finally"
    assert 0.1 <= time.monotonic() - before < 5
    service.behaviours["Generate"] = _full_at_first(2, 0.05)
    async with AsyncClient(target, retry=retry) as async_client:
        assert await async_client.generate_text("p") == "finally"
    assert len(service.requests) == 6


def test_full_server_is_not_tried_again_unless_asked(service: FakeService, client: Client) -> None:
    service.behaviours["Generate"] = _full_at_first(1, 7.5)
    with pytest.raises(OverloadedError) as caught:
        client.generate_text("p")
    assert caught.value.retry_delay_s == 7.5


def test_retries_end(service: FakeService, target: str) -> None:
    service.behaviours["Generate"] = _full_at_first(9, 0.01)
    with Client(target, retry=Retry(attempts=3)) as client, pytest.raises(OverloadedError):
        client.generate_text("p")
    assert len(service.requests) == 3


def test_no_retry_beyond_the_deadline(service: FakeService, target: str) -> None:
    service.behaviours["Generate"] = _full_at_first(9, 5.0)
    before = time.monotonic()
    with Client(target, retry=Retry(attempts=3)) as client, pytest.raises(OverloadedError):
        client.generate_text("p", timeout=2.0)
    assert time.monotonic() - before < 1.5


def test_other_errors_are_not_tried_again(service: FakeService, target: str) -> None:
    service.behaviours["Abort"] = lambda request, context: fake.refuse(context, code_pb2.INTERNAL, "a bug")
    with Client(target, retry=Retry(attempts=3)) as client, pytest.raises(ServerError):
        client.abort("x")
    assert len(service.requests) == 1


async def test_an_unavailable_server_is_tried_again(service: FakeService, target: str) -> None:
    def unavailable_at_first(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Any:
        if len(service.requests) % 3:
            fake.refuse(context, code_pb2.UNAVAILABLE, "restarting")
        return fake.answer("finally")(request, context)

    service.behaviours["Generate"] = unavailable_at_first
    retry = Retry(attempts=3, first_s=0.01)
    with Client(target, retry=retry) as client:
        assert client.generate_text("p") == "finally"
    async with AsyncClient(target, retry=retry) as async_client:
        assert await async_client.generate_text("p") == "finally"
    with Client(target, retry=Retry(attempts=2, first_s=0.01)) as client, pytest.raises(UnavailableError):
        client.generate_text("p")
    assert len(service.requests) == 8


def test_a_server_that_is_not_there_yet_is_tried_again(service: FakeService) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with Client(f"127.0.0.1:{port}", retry=Retry(attempts=3, first_s=0.01)) as client:
        before = time.monotonic()
        with pytest.raises(UnavailableError):
            client.status()
        assert time.monotonic() - before >= 0.03


def test_waits_grow_with_each_attempt() -> None:
    retry = Retry(attempts=9, first_s=0.5, longest_s=6.0)
    unavailable = UnavailableError(grpc.StatusCode.UNAVAILABLE, "connection refused")
    full = OverloadedError(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", ErrorDetails(retry_delay_s=0.5))
    for error in (unavailable, full):
        for attempt, least in enumerate((0.5, 1.0, 2.0, 4.0, 6.0, 6.0), start=1):
            delay = retry.delay_s(error, attempt)
            assert delay is not None
            assert least <= delay <= 1.25 * least


def test_only_a_full_server_that_says_when_is_tried_again() -> None:
    retry = Retry(attempts=9, longest_s=6.0)
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    asked = {5.0: (5.0, 6.25), 60.0: (6.0, 7.5)}
    for delay_s, (low, high) in asked.items():
        full = OverloadedError(code, "full", ErrorDetails(retry_delay_s=delay_s))
        delay = retry.delay_s(full, 1)
        assert delay is not None
        assert low <= delay <= high
        assert retry.delay_s(full, 9) is None, "that was the last attempt"
    assert retry.delay_s(OverloadedError(code, "message larger than max"), 1) is None


# ---- the other calls -----------------------------------------------------------------------------------------------


async def test_profile(service: FakeService, target: str) -> None:
    service.behaviours["Profile"] = fake.profile
    with Client(target) as client:
        stream = client.profile("p", num_tokens=3, fusion=False)
        assert [(step.index, step.text) for step in stream] == [(0, " word0\n"), (1, " word1\n"), (2, " word2\n")]
        assert stream.device is not None
        assert stream.model is not None
        assert stream.summary is not None
        assert (stream.device.name, stream.model.name, stream.summary.decode_tokens_per_s) == ("EPYC", "tiny", 200.0)
    request = service.requests[0]
    assert (request.num_tokens, request.fusion, request.HasField("fusion")) == (3, False, True)
    async with AsyncClient(target) as async_client:
        async_stream = async_client.profile(token_ids=[1])
        assert [step.index async for step in async_stream] == [0, 1, 2]
        assert async_stream.summary is not None
        assert async_stream.summary.num_decode_steps == 2
    assert not service.requests[1].HasField("num_tokens")


async def test_profiles_without_a_prompt(service: FakeService, target: str) -> None:
    service.behaviours["Profile"] = fake.profile
    waits: list[str] = []
    with Client(target) as client:
        list(client.profile(synthetic={"num_seqs": 2}, detail="timeline", warm_up_steps=3, unprofiled_every=4))
        list(client.profile(live_steps=5, on_wait=lambda: waits.append("sync")))
        for wrong in ({}, {"live_steps": 1, "synthetic": {}}):
            with pytest.raises(TypeError, match="exactly one of prompt"):
                client.profile(**wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="summary, ops or timeline"):
            client.profile("p", detail="all")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="'steps' is no parameter"):
            client.profile("p", steps=3)  # type: ignore[call-arg]
    async with AsyncClient(target) as async_client:
        async for _ in async_client.profile(live_steps=5, on_wait=lambda: waits.append("async")):
            pass
    assert waits == ["sync", "async"]
    synthetic, live, _ = service.requests
    assert (synthetic.synthetic.num_seqs, synthetic.synthetic.HasField("prompt_len")) == (2, False)
    assert (synthetic.detail, synthetic.warm_up_steps, synthetic.unprofiled_every) == (pb.PROFILE_DETAIL_TIMELINE, 3, 4)
    assert live.live.num_steps == 5


async def test_estimate_throughput(service: FakeService, target: str) -> None:
    service.behaviours["EstimateThroughput"] = fake.estimates
    with Client(target) as client:
        [one] = client.estimate_throughput("h200", num_parameters=10**9, num_layers=2, acceptance=0.5, batch=3)
        assert (one.gpu.key, one.decode.tokens_per_s) == ("h200", 63.0)
        with pytest.raises(ValueError, match="batch = -1"):
            client.estimate_throughput(batch=-1)
    async with AsyncClient(target) as async_client:
        assert len(await async_client.estimate_throughput(config_json="{}")) == 2
    by_size, by_config = service.requests
    assert (by_size.size.num_parameters, by_size.size.num_layers, by_size.batch) == (10**9, 2, 3)
    assert (by_size.speculation.acceptance, by_size.speculation.HasField("draft_len")) == (0.5, False)
    assert (by_config.WhichOneof("model"), by_config.HasField("speculation")) == ("config_json", False)


async def test_tokenize_and_detokenize(service: FakeService, target: str) -> None:
    service.behaviours["Tokenize"] = lambda request, context: pb.TokenizeResponse(token_ids=[len(request.text), 7])
    service.behaviours["Detokenize"] = lambda request, context: pb.DetokenizeResponse(text=str(list(request.token_ids)))
    with Client(target) as client:
        assert client.tokenize("four", add_special_tokens=False) == [4, 7]
        assert client.tokenize(messages="hi") == [0, 7]
        assert client.detokenize([5, 6], skip_special_tokens=True) == "[5, 6]"
        with pytest.raises(TypeError, match="either text or messages"):
            client.tokenize()
    plain, chat, detokenize = service.requests
    assert (plain.HasField("add_special_tokens"), plain.add_special_tokens) == (True, False)
    assert (chat.HasField("add_special_tokens"), chat.chat.messages[0].content) == (False, "hi")
    assert detokenize.skip_special_tokens
    async with AsyncClient(target) as async_client:
        assert await async_client.tokenize("four") == [4, 7]
        assert await async_client.detokenize([5]) == "[5]"


async def test_facts(service: FakeService, target: str) -> None:
    service.behaviours["GetModelInfo"] = lambda request, context: pb.GetModelInfoResponse(name="tiny", num_layers=2)
    service.behaviours["GetStatus"] = lambda request, context: pb.GetStatusResponse(state=pb.SERVER_STATE_DRAINING)
    service.behaviours["Abort"] = lambda request, context: pb.AbortResponse(usage=fake.USAGE)
    with Client(target) as client:
        assert client.model_info().num_layers == 2
        assert client.status().state == pb.SERVER_STATE_DRAINING
        assert client.abort("some").completion_tokens == 3
        assert service.requests[-1].request_id == "some"
    async with AsyncClient(target) as async_client:
        assert (await async_client.model_info()).name == "tiny"
        assert (await async_client.status()).state == pb.SERVER_STATE_DRAINING
        assert (await async_client.abort("some")).prompt_tokens == 5


async def test_health(target: str) -> None:
    with Client(target) as client:
        assert client.health() == "NOT_SERVING"
        assert client.health("liveness") == "SERVING"
        assert client.health("") == "SERVING"
        with pytest.raises(NotFoundError):
            client.health("no.such.Service")
    async with AsyncClient(target) as async_client:
        assert await async_client.health() == "NOT_SERVING"


# ---- readiness -----------------------------------------------------------------------------------------------------


def _ready_after(looks: int) -> Any:
    seen = 0

    def status(request: pb.GetStatusRequest, context: grpc.ServicerContext) -> pb.GetStatusResponse:
        nonlocal seen
        seen += 1
        if seen > looks:
            return pb.GetStatusResponse(state=pb.SERVER_STATE_READY)
        return pb.GetStatusResponse(
            state=pb.SERVER_STATE_LOADING, load_done_bytes=seen * 10**6, load_total_bytes=98 * 10**6
        )

    return status


async def test_wait_ready_tells_what_it_waits_for(service: FakeService, target: str) -> None:
    service.behaviours["GetStatus"] = _ready_after(2)
    waits: list[str] = []
    with Client(target) as client:
        client.wait_ready(10, on_wait=waits.append)
    assert waits == ["loading, 1 of 98 MB read", "loading, 2 of 98 MB read"]
    service.behaviours["GetStatus"] = _ready_after(1)
    async with AsyncClient(target) as async_client:
        await async_client.wait_ready(10, on_wait=waits.append)
    assert len(waits) == 3


def test_wait_ready_times_out_saying_why(service: FakeService, client: Client) -> None:
    service.behaviours["GetStatus"] = _ready_after(1000)
    with pytest.raises(TimeoutError, match=r"not ready after 0.5 s: loading"):
        client.wait_ready(0.5)


def test_wait_ready_ends_at_once_when_the_engine_failed(service: FakeService, client: Client) -> None:
    failed = pb.GetStatusResponse(state=pb.SERVER_STATE_FAILED, detail="no such file")
    service.behaviours["GetStatus"] = lambda request, context: failed
    with pytest.raises(ServerError, match="no such file"):
        client.wait_ready(60)


def test_wait_ready_for_a_server_that_is_not_up_yet(service: FakeService) -> None:
    service.behaviours["GetStatus"] = _ready_after(0)
    with Client(f"127.0.0.1:{_closed_port()}") as client, pytest.raises(TimeoutError, match="UNAVAILABLE"):
        client.wait_ready(0.6)


# ---- the connection ------------------------------------------------------------------------------------------------


def test_metadata_goes_with_every_call(service: FakeService, target: str) -> None:
    service.behaviours["Generate"] = fake.answer("x")
    service.behaviours["GetStatus"] = _ready_after(0)
    with Client(target, metadata=[("authorization", "Bearer t0ken")]) as client:
        client.generate_text("p")
        client.status()
    assert [metadata["authorization"] for metadata in service.metadata] == ["Bearer t0ken"] * 2


async def test_tls(service: FakeService) -> None:
    service.behaviours["GetStatus"] = _ready_after(0)
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    chain = b"".join(blob.bytes() for blob in issued.cert_chain_pems)
    with serving(service, grpc.ssl_server_credentials([(issued.private_key_pem.bytes(), chain)])) as target:
        trusting = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
        with Client(target, credentials=trusting) as client:
            assert client.status().state == pb.SERVER_STATE_READY
        async with AsyncClient(target, credentials=trusting) as async_client:
            assert (await async_client.status()).state == pb.SERVER_STATE_READY
        with Client(target) as plaintext, pytest.raises(UnavailableError):
            plaintext.status()
        stranger = grpc.ssl_channel_credentials(trustme.CA().cert_pem.bytes())
        with Client(target, credentials=stranger) as distrusting, pytest.raises(UnavailableError):
            distrusting.status()


def test_closed_client_cancels_its_streams(service: FakeService, target: str) -> None:
    service.behaviours["Generate"] = fake.endless
    client = Client(target)
    stream = client.generate("p")
    next(stream)
    client.close()
    assert service.cancelled.wait(5)


def _closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
