"""What a backend's device can do at most: measured where it is this machine, from the datasheet where it is not."""

from __future__ import annotations

from numba_engine.backends.base import Backend
from numba_engine.errors import ConfigError
from numba_engine.profiling.hardware import GPUS, Gpu, find_gpu
from numba_engine.profiling.report import Peaks

SIMULATED_GPU = GPUS["h200"]
"""What ``ptx`` predicts times for: the kernels it runs are compiled for this architecture."""

LAUNCH_S = 1.3e-6
"""What one more kernel adds to a step on an H100, in a CUDA graph: Spector et al., Look Ma, No Bubbles!, Hazy Research
2025."""

MEASURED = "measured"


def peaks_of(backend: Backend) -> Peaks:
    """The backend's device, as measured here. Takes a moment, in which nothing else should run."""
    if backend.counter is not None:
        return simulated_peaks()
    gflops, source, arithmetic = _arithmetic_peak(backend)
    return Peaks(
        device=backend.device_name,
        read_bandwidth_gbps=backend.read_bandwidth_gbps(),
        read_bandwidth_source=MEASURED,
        gflops=gflops,
        gflops_source=source,
        arithmetic=arithmetic,
    )


def simulated_peaks() -> Peaks:
    """Of the GPU that stands behind the executor's predictions."""
    gpu = SIMULATED_GPU
    return Peaks(
        device=gpu.name,
        read_bandwidth_gbps=gpu.bandwidth_gbps,
        read_bandwidth_source=gpu.source,
        gflops=_fp16_gflops(gpu),
        gflops_source=gpu.source,
        arithmetic="fp16 tensor cores",
        launch_s=LAUNCH_S,
    )


def _arithmetic_peak(backend: Backend) -> tuple[float | None, str, str]:
    """(GFLOP/s, source, which arithmetic)."""
    measured = backend.peak_gflops()
    if measured is not None:
        return measured[0], MEASURED, measured[1]
    if backend.num_threads == 0:  # a GPU
        try:
            gpu = find_gpu(backend.device_name)
        except ConfigError:
            return None, "unknown", f"no datasheet of {backend.device_name} in the table"
        return _fp16_gflops(gpu), gpu.source, "fp16 tensor cores"
    return None, "unknown", "not measured"


def _fp16_gflops(gpu: Gpu) -> float | None:
    return gpu.fp16_tflops * 1e3 if gpu.fp16_tflops is not None else None
