"""Python client of the numba_engine service.

    with Client("localhost:50051") as client:
        stream = client.generate("The capital of France is", max_tokens=16, temperature=0)
        for delta in stream:
            print(delta.text, end="", flush=True)
        print(stream.result.finish_reason, stream.result.usage.completion_tokens)

``AsyncClient`` is the same with ``async with``, ``async for`` and ``await``.
"""

from __future__ import annotations

from numba_engine_client.aio import AsyncClient, AsyncGenerationStream, AsyncProfileStream
from numba_engine_client.client import Client, GenerationStream, ProfileStream
from numba_engine_client.errors import (
    AlreadyExistsError,
    AuthenticationError,
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    FieldViolation,
    InferenceError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    ServerError,
    UnavailableError,
    UnimplementedError,
)
from numba_engine_client.requests import Message, Planning, Profiling, Sampling, Synthetic
from numba_engine_client.results import Generation
from numba_engine_client.retry import Retry

__all__ = [
    "AlreadyExistsError",
    "AsyncClient",
    "AsyncGenerationStream",
    "AsyncProfileStream",
    "AuthenticationError",
    "CancelledError",
    "Client",
    "DeadlineExceededError",
    "FailedPreconditionError",
    "FieldViolation",
    "Generation",
    "GenerationStream",
    "InferenceError",
    "InvalidRequestError",
    "Message",
    "NotFoundError",
    "OverloadedError",
    "Planning",
    "ProfileStream",
    "Profiling",
    "Retry",
    "Sampling",
    "ServerError",
    "Synthetic",
    "UnavailableError",
    "UnimplementedError",
]
