"""Bytes that are no protobuf message are a wrong request of every method, and no bug of the server."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from numba_engine_api.v1 import inference_pb2 as api
from tests.service.conftest import Serve, rest_of
from tests.service.test_errors import details_of, failure_of, generate, violations

SERVICE = "/numba_engine_api.v1.InferenceService/"
METHODS = [
    *(SERVICE + method.name for method in api.DESCRIPTOR.services_by_name["InferenceService"].methods),
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
]
BAD = [b"\xff", b"\x0a\x05ab", b"\x0a\x02\xc3\x28", b"\x0b" * 200]
"""A tag cut off, a string cut off, a string that is no UTF-8, groups nested too deep."""


def is_message_of(method: str, data: bytes) -> bool:
    name = method.rpartition("/")[2]
    try:
        getattr(api, f"{name}Request", health_pb2.HealthCheckRequest).FromString(data)
    except DecodeError:
        return False
    return True


def call_of(channel: Any, method: str, data: bytes) -> Any:
    streams = method.endswith(("Generate", "Profile", "Watch"))
    return (channel.unary_stream if streams else channel.unary_unary)(method)(data)


@pytest.mark.parametrize("method", METHODS)
async def test_bytes_that_are_no_message_are_an_invalid_argument(
    serve: Serve, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve() as served:
        for data in BAD:
            if is_message_of(method, data):
                continue  # a field that the method does not know is skipped, whatever is in it
            error = await failure_of(call_of(served.channel, method, data))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert violations(error) == {"request": "is not a message of this method in protobuf's encoding"}
            assert details_of(error)["ErrorInfo"].reason == "INVALID_REQUEST"
        assert not [record for record in caplog.records if record.exc_info]


async def test_malformed_requests_are_counted_and_logged_in_a_line(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with serve() as served:
        for method in ("Generate", "Profile", "Tokenize"):
            await failure_of(call_of(served.channel, SERVICE + method, b"\xff"))
        counters = (await served.status()).counters
        assert (counters.received, counters.invalid, counters.in_flight) == (2, 2, 0)
        lines = [record.fields for record in caplog.records if record.message == "invalid"]
        assert [(line["rpc"], line["reason"]) for line in lines] == [
            ("Generate", "INVALID_REQUEST"),
            ("Profile", "INVALID_REQUEST"),
        ]


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_a_malformed_request_ends_a_stream_of_requests(
    serve: Serve, version: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve() as served:
        reflect = served.channel.stream_stream(f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo")
        call = reflect(iter([b"\x3a\x00", b"\xff"]))
        assert await call.read()
        assert (await failure_of(call)).code() is grpc.StatusCode.INVALID_ARGUMENT
        assert not [record for record in caplog.records if record.exc_info]


async def test_well_formed_requests_pass(serve: Serve) -> None:
    async with serve() as served:
        events = [event async for event in rest_of(served.stub.Generate(generate(max_tokens=2)))]
        assert "".join(event.delta.text for event in events) == "ab"
