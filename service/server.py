"""The server from its start to its end: bind, load, serve, drain, close."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2_grpc

from numba_engine_api.v1 import inference_pb2, inference_pb2_grpc
from service.config import ServiceConfig
from service.engine_loop import EngineLoop, EngineState, Load
from service.errors import StartupError
from service.malformed import MalformedRequests
from service.reflection import add_reflection
from service.servicer import InferenceServicer
from service.status import HealthServicer, ServerStatus
from service.telemetry import configure_logging, log

SERVICE_NAME = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_KILLED = 128 + signal.SIGTERM

# After ABORTED was asked for, the engine answers within its running step, and the last messages go out.
_ABORT_S = 10.0
_CLOSE_S = 1.0


def run(config: ServiceConfig, load: Load) -> int:
    """Serves until a signal or a failure; the process's exit code. Raises StartupError where it cannot start."""
    configure_logging(config.log_level, config.log_format)
    return asyncio.run(_serve(config, load))


async def _serve(config: ServiceConfig, load: Load) -> int:
    server = Server(config, load)
    _on_signals(server)
    await server.start()
    code = await server.run_until_closed()
    if not server.threads_have_ended:
        # They are in native code, which must not meet an interpreter that is being torn down.
        logging.shutdown()
        os._exit(code)
    return code


def _on_signals(server: Server) -> None:
    """The first SIGTERM or SIGINT drains, the second ends the process at once.

    So does SIGHUP drain, which a terminal sends when it closes, unless it is to be ignored, as under nohup.
    """

    def on_signal() -> None:
        if server.closing.is_set():
            log(logging.WARNING, "second signal: ending at once")
            logging.shutdown()
            os._exit(EXIT_KILLED)
        server.closing.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGHUP, server.closing.set)


class Server:
    """One gRPC server and its engine. Make it on the event loop that will run it."""

    def __init__(self, config: ServiceConfig, load: Load) -> None:
        self.closing = asyncio.Event()
        """Set it to drain and close."""
        self.port = config.port
        """The port that is bound, once started."""
        self._config = config
        self._engine_changed = asyncio.Event()
        self._engine = EngineLoop(load, max_pending_bytes=config.max_pending_bytes, on_change=self._engine_changed.set)
        self._status = ServerStatus(self._engine, service_name=SERVICE_NAME, stuck_after_s=config.stuck_after_s)
        self._servicer = InferenceServicer(self._engine, self._status, config)
        self._grpc = grpc.aio.server(
            interceptors=[MalformedRequests(self._servicer.refuse_malformed)], options=_grpc_options(config)
        )
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self._servicer, self._grpc)
        health_pb2_grpc.add_HealthServicer_to_server(
            HealthServicer(self._status, max_watches=config.max_in_flight), self._grpc
        )
        if config.reflection:
            add_reflection((SERVICE_NAME, "grpc.health.v1.Health"), self._grpc)

    @property
    def threads_have_ended(self) -> bool:
        """The engine's has, and those for texts are idle."""
        return not (self._engine.is_alive or self._servicer.texts_are_running)

    async def start(self) -> None:
        """Binds the address and begins to load; calls are answered from here on. Raises StartupError."""
        self.port = self._bind()
        await self._grpc.start()
        if not self._config.is_loopback and self._config.tls_cert is None:
            log(logging.WARNING, "anyone who reaches this address can use the server, and reads along: it has no TLS")
        log(logging.INFO, "listening", address=self._config.address.rpartition(":")[0] + f":{self.port}")
        self._engine.start()

    async def run_until_closed(self) -> int:
        """Serves until ``closing`` is set or the engine fails; the process's exit code."""
        async with _background(self._status.watch_state()):
            failed = await self._wait_for_end()
            await (self._close() if failed else self._drain_and_close())
        return EXIT_FAILED if failed else EXIT_OK

    async def _wait_for_end(self) -> bool:
        """Whether the end is a failure."""
        while not self.closing.is_set():
            await _first_of(self.closing.wait(), self._engine_changed.wait())
            if not self._engine_changed.is_set():
                continue
            self._engine_changed.clear()
            if self._engine.state is EngineState.RUNNING:
                log(logging.INFO, "ready", model=self._engine.llm.model_info.name)
            elif self._engine.state is EngineState.FAILED and self._must_exit:
                log(logging.CRITICAL, "closing: the engine failed", cause=self._status.detail)
                return True
        return self._engine.state is EngineState.FAILED

    @property
    def _must_exit(self) -> bool:
        """A model that does not load is the operator's to mend; of a dead engine a supervisor may want to know."""
        return self._config.exit_on_engine_failure or not self._engine.is_loaded

    async def _drain_and_close(self) -> None:
        self._status.draining = True
        log(logging.INFO, "draining", in_flight=self._servicer.calls_in_flight, timeout_s=self._config.drain_timeout_s)
        self._engine.abort_watching_profile()
        if not await self._within(self._config.drain_timeout_s, lambda: self._servicer.calls_in_flight == 0):
            log(logging.WARNING, "drain timeout: aborting what runs", in_flight=self._servicer.calls_in_flight)
            self._engine.abort_all()
            await self._within(_ABORT_S, lambda: not self._engine.has_requests)
        await self._close()

    async def _within(self, timeout_s: float, condition: Callable[[], bool]) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._servicer.until(condition)
        return condition()

    async def _close(self) -> None:
        self._status.closed = True
        self._engine.stop()
        await self._grpc.stop(_CLOSE_S)
        await self._engine.join(_CLOSE_S if self._engine.is_loaded else 0.0)
        log(logging.INFO, "closed")

    def _bind(self) -> int:
        config = self._config
        _require_free(config)
        try:
            if config.tls_cert is None:
                return self._grpc.add_insecure_port(config.address)
            return self._grpc.add_secure_port(config.address, _tls_credentials(config))
        except RuntimeError as error:
            raise StartupError(f"cannot listen on {config.address}; choose another --host or --port") from error


def _grpc_options(config: ServiceConfig) -> list[tuple[str, int]]:
    # A call past its own limits gRPC cancels or resets, without a reason, a hint or a count. So they are far above
    # max_in_flight, past which the servicer refuses and says when to try again.
    max_calls = max(2**16, 2 * config.max_in_flight)
    return [
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_concurrent_streams", max_calls),
        ("grpc.server.max_pending_requests", max_calls),
        ("grpc.server.max_pending_requests_hard_limit", max_calls),
        # Without this two servers can share a port, and each gets half of the calls.
        ("grpc.so_reuseport", 0),
        # A client that vanished without a word (power, network) is found, and its place freed, within 80 s.
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # Clients may ask as often about us. One that pings oftener than this loses its connection, and all on it.
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ]


def _tls_credentials(config: ServiceConfig) -> grpc.ServerCredentials:
    assert config.tls_key is not None
    assert config.tls_cert is not None
    pem = []
    for path in (config.tls_key, config.tls_cert):
        try:
            pem.append(Path(path).read_bytes())
        except OSError as error:
            raise StartupError(f"cannot read {path}: {error.strerror}") from error
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.tls_cert, config.tls_key)
    except (ssl.SSLError, OSError) as error:
        raise StartupError(f"{config.tls_cert} and {config.tls_key} are no certificate and its key: {error}") from error
    return grpc.ssl_server_credentials([(pem[0], pem[1])])


def _require_free(config: ServiceConfig) -> None:
    """Raises StartupError with what the operating system says; gRPC only says, and at length, that it failed."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise StartupError(f"cannot listen on {config.address}: {why}; choose another --host or --port") from error


@asynccontextmanager
async def _background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs ``work`` beside the body and cancels it after."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _first_of(*waits: Coroutine[Any, Any, object]) -> None:
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
