"""Whether requests are taken now, and the health service that says so."""

from __future__ import annotations

import asyncio
import enum
import time

from grpc_health.v1 import health, health_pb2

from numba_engine import NumbaEngineError
from service.engine_loop import EngineLoop, EngineState
from service.errors import NotReadyError

LIVENESS = "liveness"
"""Health name that is SERVING as long as the process answers: for liveness probes."""

_MONITOR_INTERVAL_S = 0.25


class State(enum.Enum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class ServerStatus:
    """The server's state: what the engine's thread is doing, and whether we are shutting down."""

    def __init__(self, engine: EngineLoop, *, service_name: str, stuck_after_s: float) -> None:
        self.health = health.aio.HealthServicer()
        self.draining = False
        self._engine = engine
        self._readiness_names = (health.OVERALL_HEALTH, service_name)
        self._stuck_after_s = stuck_after_s
        self._start = time.monotonic()
        self._published: State | None = None

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

    async def publish(self) -> None:
        """Tells the health service what :attr:`state` is."""
        state = self.state
        if state is self._published:
            return
        self._published = state
        serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._readiness_names:
            await self.health.set(name, serving if state is State.READY else not_serving)
        await self.health.set(LIVENESS, serving)

    async def monitor(self) -> None:
        """Publishes again and again: a stuck engine cannot tell by itself."""
        while True:
            await self.publish()
            await asyncio.sleep(_MONITOR_INTERVAL_S)

    @property
    def _is_stuck(self) -> bool:
        running = self._engine.state is EngineState.RUNNING
        return running and self._engine.heartbeat_age_s > self._stuck_after_s
