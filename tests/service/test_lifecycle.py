"""Loading, serving, draining, dying: what health, status and requests say in each."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from numba_engine import CheckpointError
from numba_engine_api.v1 import inference_pb2 as api
from service.config import ServiceConfig
from service.errors import StartupError
from service.server import SERVICE_NAME, Server
from service.status import ServerStatus
from tests.service.conftest import PATIENCE_S, Serve, Served, rest_of
from tests.service.fake_llm import FakeLLM, FakeSession
from tests.service.test_errors import details_of, failure_of, generate

READINESS = ("", "numba_engine_api.v1.InferenceService")


async def health(served: Served) -> dict[str, str]:
    stub = health_pb2_grpc.HealthStub(served.channel)
    answers = {}
    for name in (*READINESS, "liveness"):
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
        answers[name] = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return answers


def ready_or_not(status: str) -> dict[str, str]:
    return {**dict.fromkeys(READINESS, status), "liveness": "SERVING"}


async def until_health(served: Served, expected: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await health(served) != ready_or_not(expected):
            await asyncio.sleep(0.01)


async def test_while_the_model_loads(serve: Serve) -> None:
    loaded = threading.Event()
    progressed = asyncio.Event()
    loop = asyncio.get_running_loop()

    def load(progress: Any) -> FakeSession:
        progress("weights", 30, 120)
        loop.call_soon_threadsafe(progressed.set)
        loaded.wait(PATIENCE_S)
        return FakeSession(FakeLLM())

    async with serve(load=load, ready=False) as served:
        await progressed.wait()
        assert await health(served) == ready_or_not("NOT_SERVING")
        status = await served.status()
        assert (status.state, status.detail) == (api.SERVER_STATE_LOADING, "weights")
        assert (status.load_done_bytes, status.load_total_bytes) == (30, 120)
        assert not status.HasField("engine")
        for call in (
            served.stub.Generate(generate()),
            served.stub.Profile(api.ProfileRequest(prompt="a")),
            served.stub.Tokenize(api.TokenizeRequest(text="a")),
            served.stub.Detokenize(api.DetokenizeRequest(token_ids=[1])),
            served.stub.GetModelInfo(api.GetModelInfoRequest()),
        ):
            error = await failure_of(call)
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert error.details() == "the model is being loaded"
            assert 2000 <= details_of(error)["RetryInfo"].retry_delay.ToMilliseconds() <= 3000
        assert (await failure_of(served.stub.Abort(api.AbortRequest(request_id="x")))).code() is (
            grpc.StatusCode.NOT_FOUND
        )
        watch = health_pb2_grpc.HealthStub(served.channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        loaded.set()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        assert await health(served) == ready_or_not("SERVING")
        status = await served.status()
        assert status.state == api.SERVER_STATE_READY
        assert status.counters.unavailable == 2
        assert status.engine.num_free_kv_blocks == 100


async def test_a_model_that_cannot_be_loaded_ends_the_server(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    def load(progress: Any) -> FakeSession:
        raise CheckpointError("is truncated", file="model.gguf", tensor="blk.0")

    async with serve(load=load, ready=False, exit_on_engine_failure=False) as served:
        assert await asyncio.wait_for(served.exit_code, PATIENCE_S) == 1
    causes = [record.fields["cause"] for record in caplog.records if "cause" in getattr(record, "fields", {})]
    assert causes == ["model.gguf: tensor 'blk.0': is truncated"]


async def test_the_engine_s_death_ends_streams_and_process(serve: Serve) -> None:
    async with serve(FakeLLM(gated=True)) as served:
        calls = [served.stub.Generate(generate(request_id=f"r{i}")) for i in range(2)]
        await served.until(lambda status: status.engine.num_running + status.engine.num_waiting > 0)
        await served.step_until(lambda status: status.engine.num_running == 2)  # one that arrives later is UNAVAILABLE
        served.llm.fail_in_step = MemoryError("secret")
        served.llm.allow(1)
        for i, call in enumerate(calls):
            error = await failure_of(call)
            assert error.code() is grpc.StatusCode.INTERNAL
            assert error.details() == f"the engine failed; the server's log has it under request id r{i}"
            assert details_of(error)["ErrorInfo"].reason == "ENGINE_FAILED"
        assert await asyncio.wait_for(served.exit_code, PATIENCE_S) == 1


async def test_a_server_that_stays_says_that_its_engine_is_dead(serve: Serve) -> None:
    async with serve(FakeLLM(gated=True), exit_on_engine_failure=False) as served:
        call = served.stub.Generate(generate())
        await call.read()
        served.llm.fail_in_step = RuntimeError("secret")
        served.llm.allow(1)
        assert (await failure_of(call)).code() is grpc.StatusCode.INTERNAL
        await until_health(served, "NOT_SERVING")
        status = await served.status()
        assert status.state == api.SERVER_STATE_FAILED
        assert status.detail == "the engine failed; the server's log says why"
        error = await failure_of(served.stub.Generate(generate()))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "RetryInfo" not in details_of(error), "it will not come back by itself"
        assert (await served.stub.GetModelInfo(api.GetModelInfoRequest())).name == "fake"
        served.server.closing.set()
        assert await asyncio.wait_for(served.exit_code, PATIENCE_S) == 1


async def test_a_step_that_does_not_end_shows_and_passes(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    async with serve(FakeLLM(gated=True), stuck_after_s=0.05) as served:
        call = served.stub.Generate(generate(max_tokens=1))
        await call.read()
        await until_health(served, "NOT_SERVING")
        status = await served.status()
        assert status.state == api.SERVER_STATE_FAILED
        assert "in one step for" in status.detail
        assert status.engine_heartbeat_age_s > 0.05
        assert (await failure_of(served.stub.Generate(generate()))).code() is grpc.StatusCode.UNAVAILABLE
        await served.until(lambda status: "the engine is stuck" in caplog.messages)
        served.llm.open_gate()
        assert [event.WhichOneof("event") async for event in rest_of(call)] == ["delta", "finished"]


async def test_an_idle_engine_is_not_stuck(serve: Serve) -> None:
    async with serve(stuck_after_s=1.5) as served:
        ages = []
        async with asyncio.timeout(PATIENCE_S):
            # It shows life about once a second: wait for one sign after another.
            while len(ages) < 2 or ages[-1] > ages[-2]:
                ages.append((await served.status()).engine_heartbeat_age_s)
                await asyncio.sleep(0.02)
        assert max(ages) < 1.5
        assert await health(served) == ready_or_not("SERVING")


async def test_draining_finishes_what_runs_and_takes_nothing_new(serve: Serve) -> None:
    async with serve(FakeLLM(gated=True)) as served:
        call = served.stub.Generate(generate(max_tokens=3))
        await call.read()
        served.server.closing.set()
        await served.until(lambda status: status.state == api.SERVER_STATE_DRAINING)
        assert await health(served) == ready_or_not("NOT_SERVING")
        error = await failure_of(served.stub.Generate(generate()))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert error.details() == "the server is shutting down"
        assert "RetryInfo" in details_of(error)
        served.llm.open_gate()
        events = [event async for event in rest_of(call)]
        assert events[-1].finished.finish_reason == api.FINISH_REASON_MAX_TOKENS
        assert "".join(event.delta.text for event in events) == "aba"
        assert await asyncio.wait_for(served.exit_code, PATIENCE_S) == 0


async def test_draining_ends_with_aborted_after_its_time(serve: Serve) -> None:
    llm = FakeLLM(max_model_len=10**9)
    async with serve(llm, drain_timeout_s=0.1) as served:
        calls = [served.stub.Generate(generate(time_limit_s=60)) for _ in range(6)]
        lasts = [asyncio.create_task(_last_of(call)) for call in calls]
        await served.until(lambda status: status.engine.num_running == 4 and status.engine.num_waiting == 2)
        served.server.closing.set()
        for last in await asyncio.gather(*lasts):
            assert last.finished.finish_reason == api.FINISH_REASON_ABORTED
        assert await asyncio.wait_for(served.exit_code, PATIENCE_S) == 0


async def _last_of(call: Any) -> api.GenerateResponse:
    return [response async for response in call][-1]


async def test_an_open_health_watch_does_not_hold_up_the_end(serve: Serve) -> None:
    async with serve() as served:
        watch = health_pb2_grpc.HealthStub(served.channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        served.server.closing.set()
        assert [answer.status async for answer in rest_of(watch)] in ([], [health_pb2.HealthCheckResponse.NOT_SERVING])
        assert await asyncio.wait_for(served.exit_code, 10) == 0


async def test_watches_are_woken_by_changes_alone(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve() as served:
        watches = [
            health_pb2_grpc.HealthStub(served.channel).Watch(health_pb2.HealthCheckRequest()) for _ in range(100)
        ]
        answers = await asyncio.gather(*(watch.read() for watch in watches))
        assert {answer.status for answer in answers} == {health_pb2.HealthCheckResponse.SERVING}
        looks = 0
        health_of = ServerStatus.health_of

        def counted(status: ServerStatus, name: str) -> int | None:
            nonlocal looks
            looks += 1
            return health_of(status, name)

        monkeypatch.setattr(ServerStatus, "health_of", counted)
        await asyncio.sleep(0.5)
        assert looks == 0
        served.server._status.draining = True
        answers = await asyncio.gather(*(watch.read() for watch in watches))
        assert {answer.status for answer in answers} == {health_pb2.HealthCheckResponse.NOT_SERVING}
        assert looks == len(watches)


async def test_watches_are_limited_and_an_ended_one_leaves_room(serve: Serve) -> None:
    async with serve(max_in_flight=2) as served:
        stub = health_pb2_grpc.HealthStub(served.channel)
        open_ones = [stub.Watch(health_pb2.HealthCheckRequest(service="liveness")) for _ in range(2)]
        await asyncio.gather(*(watch.read() for watch in open_ones))
        error = await _failure(stub.Watch(health_pb2.HealthCheckRequest()))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.details() == "2 watches are open, the limit is 2; use Check"
        open_ones[0].cancel()
        async with asyncio.timeout(PATIENCE_S):
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    assert (await stub.Watch(health_pb2.HealthCheckRequest()).read()).status == 1
                    break


async def _failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    return caught.value


async def test_health_of_a_name_that_is_not_served(serve: Serve) -> None:
    async with serve() as served:
        stub = health_pb2_grpc.HealthStub(served.channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="other"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="other"))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


VERSIONS = ("v1", "v1alpha")


async def reflected(served: Served, version: str, **request: str) -> Any:
    """The answer of one version of reflection, whose messages are the same."""
    call = served.channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    [answer] = [answer async for answer in call(iter([reflection_pb2.ServerReflectionRequest(**request)]))]
    return answer


@pytest.mark.parametrize("version", VERSIONS)
async def test_reflection_lists_and_describes_all_services(serve: Serve, version: str) -> None:
    async with serve() as served:
        answer = await reflected(served, version, list_services="")
        names = sorted(service.name for service in answer.list_services_response.service)
        assert names == [
            "grpc.health.v1.Health",
            "grpc.reflection.v1.ServerReflection",
            "grpc.reflection.v1alpha.ServerReflection",
            "numba_engine_api.v1.InferenceService",
        ]
        for name in names:
            answer = await reflected(served, version, file_containing_symbol=name)
            [data, *_] = answer.file_descriptor_response.file_descriptor_proto
            file = descriptor_pb2.FileDescriptorProto.FromString(data)
            assert [f"{file.package}.{service.name}" for service in file.service] == [name]
            types = [method.input_type for service in file.service for method in service.method]
            assert all(kind.startswith(f".{file.package}.") for kind in types)


@pytest.mark.parametrize("version", VERSIONS)
async def test_reflection_can_be_turned_off(serve: Serve, version: str) -> None:
    async with serve(reflection=False) as served:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await reflected(served, version, list_services="")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert READINESS[1] == SERVICE_NAME


async def test_a_port_that_is_taken(serve: Serve) -> None:
    async with serve() as served:
        with pytest.raises(StartupError, match=r"cannot listen on 127\.0\.0\.1:\d+: address already in use"):
            await Server(ServiceConfig(port=served.server.port), lambda progress: FakeSession(FakeLLM())).start()


@pytest.mark.parametrize("host", ["no-such-host.invalid", "203.0.113.7"])
async def test_an_address_that_is_not_here(host: str) -> None:
    with pytest.raises(StartupError, match=f"cannot listen on {host}:0: .*choose another --host"):
        await Server(ServiceConfig(host=host, port=0), lambda progress: FakeSession(FakeLLM())).start()


async def test_ipv6_loopback(serve: Serve) -> None:
    try:
        server = Server(ServiceConfig(host="::1", port=0), lambda progress: FakeSession(FakeLLM()))
        await server.start()
    except StartupError as error:
        pytest.skip(f"no IPv6 here: {error}")
    exit_code = asyncio.create_task(server.run_until_closed())
    async with grpc.aio.insecure_channel(f"[::1]:{server.port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        assert (await stub.Check(health_pb2.HealthCheckRequest(service="liveness"))).status == 1
    server.closing.set()
    assert await exit_code == 0


async def test_a_warning_where_others_can_connect(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    async with serve():
        assert not [r for r in caplog.records if r.levelname == "WARNING"]
    async with serve(host="0.0.0.0"):
        assert [r.message for r in caplog.records if r.levelname == "WARNING"] == [
            "anyone who reaches this address can use the server, and reads along: it has no TLS"
        ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"port": 70000}, r"port must be 0 \(any free one\) to 65535, got 70000"),
        ({"host": ""}, "host must be"),
        ({"tls_cert": "a"}, "go together"),
        ({"max_message_bytes": 1}, "max_message_bytes must be"),
        ({"max_pending_bytes": 2**23}, "max_pending_bytes must be"),
        ({"drain_timeout_s": -1}, "drain_timeout_s must be"),
        ({"stuck_after_s": float("nan")}, "stuck_after_s must be"),
        ({"max_in_flight": 0}, "max_in_flight must be"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        ServiceConfig(**settings)
