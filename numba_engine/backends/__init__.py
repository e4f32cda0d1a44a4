"""Backends: one vocabulary of ops (``base.py``), three ways to run it. numba is imported only below this folder."""

from __future__ import annotations

from numba_engine.backends.base import Backend
from numba_engine.config import EngineConfig


def create_backend(config: EngineConfig) -> Backend:
    """The backend the configuration names; ``auto`` takes cuda where a usable GPU is, else cpu.

    Raises:
        BackendUnavailableError: with what is missing.
    """
    match config.backend:
        case "cuda":
            return _cuda(config)
        case "ptx":
            return _ptx(config)
        case "auto":
            return _cuda(config) if _has_gpu() else _cpu(config)
        case "cpu":
            return _cpu(config)


def _has_gpu() -> bool:
    from numba_engine.backends.cuda.availability import why_no_gpu

    return why_no_gpu() is None


def _cuda(config: EngineConfig) -> Backend:
    from numba_engine.backends.cuda.availability import require_gpu

    require_gpu()
    from numba_engine.backends.cuda.backend import CudaBackend
    from numba_engine.backends.cuda.cuda_device import CudaDevice
    from numba_engine.backends.cuda.timers import op_timer

    device = CudaDevice()
    backend = CudaBackend(device, config, name="cuda")
    backend.timer = op_timer(device)
    return backend


def _ptx(config: EngineConfig) -> Backend:
    from numba_engine.backends.cuda.availability import require_packages

    require_packages("ptx", ("numba_cuda",), "pip install -e '.[ptx]'")
    from numba_engine.backends.cuda.backend import CudaBackend
    from numba_engine.backends.ptx import PtxDevice
    from numba_engine.backends.ptx.traffic_counter import TrafficCounter

    device = PtxDevice()
    backend = CudaBackend(device, config, name="ptx")
    backend.counter = TrafficCounter(device)
    return backend


def _cpu(config: EngineConfig) -> Backend:
    from numba_engine.backends.cpu.backend import CpuBackend

    return CpuBackend(config)
