"""Whether requests are taken now, and the health service that says so."""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from numba_engine import NumbaEngineError
from service.engine_loop import EngineLoop, EngineState
from service.errors import NotReadyError
from service.telemetry import log

LIVENESS = "liveness"
"""Health name that is SERVING as long as the process answers: for liveness probes."""

_LOOK_S = 0.1


class State(enum.Enum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class ServerStatus:
    """The server's state: what the engine's thread is doing, and whether we are shutting down."""

    def __init__(self, engine: EngineLoop, *, service_name: str, stuck_after_s: float) -> None:
        self.draining = False
        self.closed = False
        self.changed = asyncio.Event()
        """Set, and another put in its place, when the state has changed or the server closes."""
        self._engine = engine
        self._readiness_names = ("", service_name)
        self._stuck_after_s = stuck_after_s
        self._start = time.monotonic()

    @property
    def uptime_s(self) -> float:
        return time.monotonic() - self._start

    @property
    def state(self) -> State:
        if self._engine.state is EngineState.FAILED or self._is_stuck:
            return State.FAILED
        if self.draining or self._engine.state is EngineState.STOPPED:
            return State.DRAINING
        return State.LOADING if self._engine.state is EngineState.LOADING else State.READY

    @property
    def detail(self) -> str:
        """Why the state is LOADING or FAILED, for people; without the texts of bugs, which are the log's."""
        error = self._engine.error
        if isinstance(error, NumbaEngineError):
            return str(error)
        if error is not None:
            return "the engine failed; the server's log says why"
        if self._is_stuck:
            return f"the engine has been in one step for {self._engine.heartbeat_age_s:.0f} s"
        return self._engine.load_progress.what if self.state is State.LOADING else ""

    def require_ready(self) -> None:
        """Raises NotReadyError unless requests are taken."""
        match self.state:
            case State.LOADING:
                raise NotReadyError("the model is being loaded", retry_after_s=2.0)
            case State.DRAINING:
                raise NotReadyError("the server is shutting down", retry_after_s=5.0)
            case State.FAILED:
                raise NotReadyError(self.detail, retry_after_s=None)

    def health_of(self, name: str) -> int | None:
        """The serving status of a health name, by the engine as it is now; None for a name that is not ours."""
        if name == LIVENESS:
            return health_pb2.HealthCheckResponse.SERVING
        if name not in self._readiness_names:
            return None
        ready = self.state is State.READY
        return health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING

    async def watch_state(self) -> None:
        """Wakes who waits for a change; looks after the engine's thread, which cannot tell by itself that it is stuck.

        One look from time to time, however many wait.
        """
        was_stuck, was = False, None
        while True:
            if self._is_stuck is not was_stuck:
                was_stuck = self._is_stuck
                log(logging.ERROR, "the engine is stuck" if was_stuck else "the engine goes on", detail=self.detail)
            if (now := (self.state, self.closed)) != was:
                was = now
                changed, self.changed = self.changed, asyncio.Event()
                changed.set()
            await asyncio.sleep(_LOOK_S)

    @property
    def _is_stuck(self) -> bool:
        running = self._engine.state is EngineState.RUNNING
        return running and self._engine.heartbeat_age_s > self._stuck_after_s


class HealthServicer(health_pb2_grpc.HealthServicer):
    """``grpc.health.v1`` straight from :class:`ServerStatus`.

    The one that comes with gRPC holds a lock while it writes to a watcher, so that a client that does not read keeps
    everyone from learning the next status.
    """

    def __init__(self, status: ServerStatus, *, max_watches: int) -> None:
        """
        Args:
            max_watches: Open at once; one more is refused.
        """
        self._status = status
        self._max_watches = max_watches
        self._num_watches = 0

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        status = self._status.health_of(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r:.100} is served here")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """The status now and after each change, until the server closes."""
        if self._num_watches >= self._max_watches:
            message = f"{self._num_watches} watches are open, the limit is {self._max_watches}; use Check"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, message)
        self._num_watches += 1
        try:
            await self._tell_changes(request.service, context)
        finally:
            self._num_watches -= 1

    async def _tell_changes(self, name: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        sent = None
        while not self._status.closed:
            changed = self._status.changed
            status = self._status.health_of(name)
            if status is None:
                status = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            if status != sent:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                sent = status
            await changed.wait()
