"""Requests that are no protobuf message: refused as any other wrong request, where gRPC would call them a bug."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

_Context = grpc.aio.ServicerContext[Any, Any]
Refuse = Callable[[str, _Context], Awaitable[None]]


class MalformedRequests(grpc.aio.ServerInterceptor):
    """Ends calls of any method whose request cannot be parsed by ``refuse(method, context)``, which must not return."""

    def __init__(self, refuse: Refuse) -> None:
        self._refuse = refuse

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method

        async def answer_one(request: Any, context: _Context) -> Any:
            if request is _MALFORMED:
                await self._refuse(method, context)
            return await (handler.unary_stream or handler.unary_unary)(request, context)

        async def answer_many(requests: AsyncIterator[Any], context: _Context) -> AsyncIterator[Any]:
            async def well_formed() -> AsyncIterator[Any]:
                async for request in requests:
                    if request is _MALFORMED:
                        await self._refuse(method, context)
                    yield request

            async for response in handler.stream_stream(well_formed(), context):
                yield response

        parts = {"request_deserializer": _tolerant(handler.request_deserializer)}
        if handler.stream_stream is not None:
            return handler._replace(**parts, stream_stream=answer_many)
        kind = "unary_unary" if handler.unary_stream is None else "unary_stream"
        return handler._replace(**parts, **{kind: answer_one})


_MALFORMED = object()


def _tolerant(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """What it returns for a message that cannot be parsed is ``_MALFORMED``: gRPC has no other way to be told."""

    def parsed(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return _MALFORMED

    return parsed
