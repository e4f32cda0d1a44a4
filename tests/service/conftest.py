"""A server with a FakeLLM on a loopback port, and a channel to it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import pytest

from numba_engine_api.v1 import inference_pb2 as api
from numba_engine_api.v1 import inference_pb2_grpc as api_grpc
from service.config import ServiceConfig
from service.server import Server
from tests.service.fake_llm import FakeLLM, FakeSession

PATIENCE_S = 20.0
"""For everything that is awaited: far more than it takes, so that only a hang gets there."""


@dataclass
class Served:
    server: Server
    llm: Any
    session: Any
    channel: grpc.aio.Channel
    stub: Any
    exit_code: asyncio.Task[int]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    async def status(self) -> api.GetStatusResponse:
        return await self.stub.GetStatus(api.GetStatusRequest())

    async def until(self, condition: Callable[[api.GetStatusResponse], bool]) -> api.GetStatusResponse:
        """The status as soon as the condition holds for it."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            status = await self.status()
            if condition(status):
                return status
            assert time.monotonic() < deadline, f"waited in vain; the status is {status}"
            await asyncio.sleep(0.005)

    async def step_until(self, condition: Callable[[api.GetStatusResponse], bool]) -> api.GetStatusResponse:
        """The same with a gated engine, which is let take one step after the other until then.

        It takes none where the condition has come true in between and has left nothing to do.
        """
        while not condition(status := await self.status()):
            self.llm.allow(1)
            await self.until(
                lambda now, before=status: now.engine.num_steps > before.engine.num_steps or condition(now)
            )
        return status

    async def until_ready(self) -> None:
        await self.until(lambda status: status.state == api.SERVER_STATE_READY)


async def rest_of(call: Any) -> AsyncIterator[Any]:
    """What is left of a stream; unlike iterating over the call, it goes together with ``call.read()``."""
    while (response := await call.read()) is not grpc.aio.EOF:
        yield response


Serve = Callable[..., AbstractAsyncContextManager[Served]]


@asynccontextmanager
async def _serve(
    llm: Any = None,
    *,
    load: Callable[[Any], Any] | None = None,
    ready: bool = True,
    channel_options: tuple[tuple[str, int], ...] = (),
    **settings: Any,
) -> AsyncIterator[Served]:
    llm = llm or FakeLLM()
    session = FakeSession(llm)
    server = Server(ServiceConfig(port=0, **settings), load or (lambda progress: session))
    await server.start()
    exit_code = asyncio.create_task(server.run_until_closed())
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=channel_options)
    served = Served(server, llm, session, channel, api_grpc.InferenceServiceStub(channel), exit_code)
    try:
        if ready:
            await served.until_ready()
        yield served
    finally:
        await channel.close()
        if isinstance(llm, FakeLLM):
            llm.open_gate()
        server.closing.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait_for(exit_code, PATIENCE_S)


@pytest.fixture
def serve() -> Serve:
    """``async with serve(llm, **settings) as served``"""
    return _serve
