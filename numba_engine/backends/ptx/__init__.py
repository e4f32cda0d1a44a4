"""The PTX executor: compiled CUDA kernels run, checked and counted without a GPU."""

from __future__ import annotations

from numba_engine.backends.ptx.counters import ArrayCounters, LaunchCounters, Traffic
from numba_engine.backends.ptx.device import LoadedKernel, PtxArray, PtxDevice
from numba_engine.backends.ptx.errors import PtxError
from numba_engine.backends.ptx.machine import Checks

__all__ = ["ArrayCounters", "Checks", "LaunchCounters", "LoadedKernel", "PtxArray", "PtxDevice", "PtxError", "Traffic"]
