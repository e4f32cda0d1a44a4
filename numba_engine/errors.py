"""Every error the package raises on purpose, in one hierarchy.

Each says what was got and what is allowed. ``service/translate.py`` maps each class to one gRPC status;
anything outside this hierarchy is a bug.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


class NumbaEngineError(Exception):
    """Base of all errors raised on purpose. Each can be pickled and copied, whatever its constructor takes."""

    def __reduce__(self) -> tuple[Callable[..., Exception], tuple[object, ...]]:
        return restored_error, (type(self), self.args, self.__dict__)


def restored_error(kind: type[Exception], args: tuple[object, ...], state: dict[str, object]) -> Exception:
    """The error as it was: from what its base class keeps, not from its constructor's arguments."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One parameter of a request that is wrong: which, and why."""

    field: str
    description: str


class InvalidRequestError(NumbaEngineError):
    """A request whose prompt or parameters cannot be served as given; nothing was started."""

    def __init__(self, *violations: FieldViolation) -> None:
        super().__init__("; ".join(f"{v.field}: {v.description}" for v in violations))
        self.violations = violations


class ConfigError(NumbaEngineError):
    """An engine setting that is out of range or contradicts another."""


class CheckpointError(NumbaEngineError):
    """A model file that is truncated, inconsistent or hostile. Names the file and, where known, the tensor."""

    def __init__(self, message: str, *, file: str, tensor: str | None = None) -> None:
        where = f"{file}: tensor {tensor!r}" if tensor else file
        super().__init__(f"{where}: {message}")
        self.file = file
        self.tensor = tensor


class UnsupportedModelError(CheckpointError):
    """A well-formed model that needs something this engine does not have. Names the field and its value."""

    def __init__(self, field: str, value: object, allowed: str, *, file: str) -> None:
        super().__init__(f"{field} = {value!r} is not supported; supported: {allowed}", file=file)
        self.field = field
        self.value = value


class QueueFullError(NumbaEngineError):
    """Every place to run or to wait is taken. ``retry_after_s`` estimates in which time one gets free."""

    def __init__(self, num_requests: int, limit: int, retry_after_s: float) -> None:
        super().__init__(f"{num_requests} requests run or wait, the limit is {limit}; try again later")
        self.retry_after_s = retry_after_s


class NonFiniteLogitsError(NumbaEngineError):
    """A request whose logits are no finite numbers, so that no token could be chosen. Ends it, and no other."""


class BackendUnavailableError(NumbaEngineError):
    """The requested backend cannot run on this machine. Says what is missing and how to get it."""


class OutOfMemoryError(NumbaEngineError):
    """Weights and the smallest usable KV cache do not fit. Gives the numbers."""
