"""What happened to the requests: counters for GetStatus, and one log line for each request."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numba_engine import FinishReason, RequestOutput, Usage
from service.config import LogFormat, LogLevel


@dataclass(slots=True)
class Counters:
    """Requests since the start, by how they ended; named as ``ServiceCounters`` in the API, where each is explained."""

    received: int = 0
    finished: int = 0
    aborted: int = 0
    cancelled: int = 0
    deadline_exceeded: int = 0
    invalid: int = 0
    rejected: int = 0
    unavailable: int = 0
    slow_client: int = 0
    failed: int = 0

    @property
    def in_flight(self) -> int:
        return self.received - (
            self.finished
            + self.aborted
            + self.cancelled
            + self.deadline_exceeded
            + self.invalid
            + self.rejected
            + self.unavailable
            + self.slow_client
            + self.failed
        )


class RequestRecord:
    """One request from its arrival to its end, for the counters and the log. Never holds prompts or texts."""

    def __init__(self, counters: Counters, rpc: str, request_id: str, peer: str) -> None:
        self.request_id = request_id
        self._counters = counters
        self._outcome = "failed"
        self._arrival = time.monotonic()
        self._fields: dict[str, Any] = {"rpc": rpc, "request_id": request_id, "peer": peer}
        counters.received += 1

    def note(self, **fields: Any) -> None:
        """Adds to what the log line will say."""
        self._fields.update(fields)

    def note_output(self, output: RequestOutput) -> None:
        """Takes down how far the request has come, and how it finished."""
        self._note_usage(output.usage)
        if output.finish_reason is not None:
            self.note_end(output.usage, output.finish_reason)

    def note_end(self, usage: Usage, reason: FinishReason | None) -> None:
        """Takes down how it finished: None is as it was meant to."""
        self._note_usage(usage)
        self._outcome = "aborted" if reason is FinishReason.ABORTED else "finished"
        if reason is not None:
            self._fields["finish_reason"] = reason.value

    def _note_usage(self, usage: Usage) -> None:
        self._fields["prompt_tokens"] = usage.prompt_tokens
        self._fields["completion_tokens"] = usage.completion_tokens

    def finish(self) -> None:
        """Counts and logs a request that ended with a finish reason."""
        self.end(self._outcome)

    def end(self, outcome: str, *, level: int = logging.INFO, error: BaseException | None = None) -> None:
        """Counts and logs an end. ``outcome`` is a field of :class:`Counters`; ``error`` is logged with its trace."""
        setattr(self._counters, outcome, getattr(self._counters, outcome) + 1)
        self._fields["seconds"] = round(time.monotonic() - self._arrival, 4)
        log(level, outcome, error=error, **self._fields)


def log(level: int, event: str, *, error: BaseException | None = None, **fields: Any) -> None:
    """Logs an event with its fields; the formatters of :func:`configure_logging` know them."""
    logging.getLogger("service").log(level, event, exc_info=error, extra={"fields": fields})


def configure_logging(level: LogLevel, log_format: LogFormat) -> None:
    """Logs to stderr, one line an event (and a traceback for a bug)."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if log_format == "json" else _TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class _TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields: Mapping[str, Any] = getattr(record, "fields", {})
        return " ".join(
            [super().formatMessage(record), *(f"{name}={_quoted(value)}" for name, value in fields.items())]
        )


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


def _quoted(value: Any) -> str:
    text = str(value)
    plain = text.isprintable() and text and not any(c in ' "=' for c in text)
    return text if plain else json.dumps(text)
