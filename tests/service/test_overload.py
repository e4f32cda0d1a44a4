"""More calls than there is room for: each is served, or refused with a reason and a hint when to try again."""

from __future__ import annotations

import asyncio
from collections import Counter

import grpc
import grpc.aio
import pytest

from numba_engine_api.v1 import inference_pb2_grpc as api_grpc
from tests.service.conftest import Serve, rest_of
from tests.service.fake_llm import FakeLLM
from tests.service.test_errors import details_of, generate


async def outcome(stub: api_grpc.InferenceServiceStub) -> str:
    """How one small request ended; of a refusal, its reason."""
    try:
        async for _ in rest_of(stub.Generate(generate(max_tokens=1))):
            pass
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
            return f"{error.code().name} {error.details()}"
        details = details_of(error)
        assert details["RetryInfo"].retry_delay.ToMilliseconds() > 0
        return details["ErrorInfo"].reason
    return "finished"


@pytest.mark.parametrize(("connections", "calls"), [(8, 250), (1, 1500)])
async def test_a_burst_is_refused_by_the_servicer_and_never_by_grpc(serve: Serve, connections: int, calls: int) -> None:
    """Beyond limits of its own gRPC cancels calls without a word, and the counters never hear of them."""
    async with serve(FakeLLM(step_delay_s=0.02)) as served:
        options = [("grpc.use_local_subchannel_pool", 1)]
        channels = [grpc.aio.insecure_channel(served.address, options=options) for _ in range(connections)]
        stubs = [api_grpc.InferenceServiceStub(channel) for channel in channels]
        outcomes = Counter(await asyncio.gather(*(outcome(stub) for stub in stubs for _ in range(calls))))
        assert set(outcomes) == {"finished", "QUEUE_FULL"}
        counters = (await served.status()).counters
        assert (counters.finished, counters.rejected) == (outcomes["finished"], outcomes["QUEUE_FULL"])
        assert counters.received == connections * calls
        await asyncio.gather(*(channel.close() for channel in channels))
