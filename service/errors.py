"""What the service refuses or gives up by itself, beside the errors of the engine."""

from __future__ import annotations

from numba_engine import NumbaEngineError


class NotReadyError(NumbaEngineError):
    """The server takes no requests now: it loads, drains, or its engine failed."""

    def __init__(self, reason: str, retry_after_s: float | None) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class DuplicateRequestError(NumbaEngineError):
    """A request of this id is in the engine."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"a request with id {request_id!r} is running; ids are unique among running requests")


class UnknownRequestError(NumbaEngineError):
    """No request of this id is in the engine (any more)."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"no request with id {request_id!r} is queued or running; it may have finished")


class NoChatTemplateError(NumbaEngineError):
    """A chat for a model that has no chat template."""

    def __init__(self, model: str) -> None:
        super().__init__(f"model {model!r} has no chat template: send `prompt` or `token_ids` instead of `chat`")


class ProfileBusyError(NumbaEngineError):
    """A profile is running; there is one at a time. Says not whose: with its id it could be aborted."""

    retry_after_s = 5.0

    def __init__(self) -> None:
        super().__init__("a profile is running, and there is one at a time")


class ProfileOffError(NumbaEngineError):
    """The server was started with ``--profile off``."""

    def __init__(self) -> None:
        super().__init__("this server lets nobody profile: it was started with --profile off")


class TextsFullError(NumbaEngineError):
    """Texts wait to be tokenised, and one more would be too much."""

    def __init__(self, waiting_bytes: int, limit_bytes: int, retry_after_s: float) -> None:
        super().__init__(f"{waiting_bytes} bytes of texts wait to be tokenised, the limit is {limit_bytes}")
        self.retry_after_s = max(retry_after_s, 0.1)


class SlowClientError(NumbaEngineError):
    """The client reads so slowly, or so long not at all, that its request was ended."""

    @classmethod
    def behind(cls, pending_bytes: int, limit_bytes: int) -> SlowClientError:
        return cls(
            f"the client reads too slowly: {pending_bytes} bytes of output were unread, the limit is {limit_bytes}; "
            "the request was ended after what was sent"
        )

    @classmethod
    def stalled(cls, limit_s: float) -> SlowClientError:
        return cls(f"the client left a message unread for {limit_s:g} s; the request was ended")


class EngineFailedError(Exception):
    """The engine's thread died under a running request. A bug, so not one of the errors raised on purpose."""


class StartupError(NumbaEngineError):
    """The server cannot start as configured. Says which setting, and why."""
