"""Backends: one vocabulary of ops (``base.py``), three ways to run it. numba is imported only below this folder."""

from __future__ import annotations

from numba_engine.backends.base import Backend
from numba_engine.config import EngineConfig
from numba_engine.errors import BackendUnavailableError


def create_backend(config: EngineConfig) -> Backend:
    """The backend the configuration names; ``auto`` takes the best that runs here.

    Raises:
        BackendUnavailableError: with what is missing.
    """
    match config.backend:
        case "auto" | "cpu":
            from numba_engine.backends.cpu.backend import CpuBackend

            return CpuBackend(config)
        case _:
            raise BackendUnavailableError(
                f"backend {config.backend!r} is not part of this version yet; available: cpu (and auto)"
            )
