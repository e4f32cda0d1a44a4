"""What a backend's device can do at most: measured where it is this machine, from the datasheet where it is not."""

from __future__ import annotations

from collections.abc import Sequence

from numba_engine.backends.base import Backend
from numba_engine.errors import ConfigError
from numba_engine.formats import FORMATS, Q8_0, Format
from numba_engine.profiling.hardware import GPUS, Gpu, find_gpu
from numba_engine.profiling.report import Peaks

SIMULATED_GPU = GPUS["h200"]
"""What ``ptx`` predicts times for: the kernels it runs are compiled for this architecture."""

LAUNCH_S = 1.3e-6
"""What one more kernel adds to a step on an H100, in a CUDA graph: Spector et al., Look Ma, No Bubbles!, Hazy Research
2025."""

MEASURED = "measured"


_PLANES = 2
"""Products of the tensor cores that make one of the model's: activations have more bits than their operands."""


def peaks_of(backend: Backend, weight_formats: Sequence[str]) -> Peaks:
    """The backend's device, as measured here, for a model whose weights are mostly of the first of the formats. Takes a
    moment, in which nothing else should run."""
    format = FORMATS[weight_formats[0]]
    if backend.counter is not None:
        return simulated_peaks(format)
    gflops, source, arithmetic = _arithmetic_peak(backend, format)
    return Peaks(
        device=backend.device_name,
        read_bandwidth_gbps=backend.read_bandwidth_gbps(),
        read_bandwidth_source=MEASURED,
        gflops=gflops,
        gflops_source=source,
        arithmetic=arithmetic,
    )


def simulated_peaks(format: Format = Q8_0) -> Peaks:
    """Of the GPU that stands behind the executor's predictions."""
    gpu = SIMULATED_GPU
    gflops, arithmetic = _tensor_core_peak(gpu, format)
    return Peaks(
        device=gpu.name,
        read_bandwidth_gbps=gpu.bandwidth_gbps,
        read_bandwidth_source=gpu.source,
        gflops=gflops,
        gflops_source=gpu.source,
        arithmetic=arithmetic,
        launch_s=LAUNCH_S,
    )


def _arithmetic_peak(backend: Backend, format: Format) -> tuple[float | None, str, str]:
    """(GFLOP/s, source, which arithmetic)."""
    measured = backend.peak_gflops(format)
    if measured is not None:
        return measured[0], MEASURED, measured[1]
    if backend.num_threads == 0:  # a GPU
        try:
            gpu = find_gpu(backend.device_name)
        except ConfigError:
            return None, "unknown", f"no datasheet of {backend.device_name} in the table"
        gflops, arithmetic = _tensor_core_peak(gpu, format)
        return gflops, gpu.source if gflops else "unknown", arithmetic
    return None, "unknown", "not measured"


def _tensor_core_peak(gpu: Gpu, format: Format) -> tuple[float | None, str]:
    """(GFLOP/s of the model's, of which units)."""
    tera, name = (gpu.int8_tops, "int8") if format.is_quantized else (gpu.fp16_tflops, "fp16")
    return (tera * 1e3 / _PLANES if tera else None), f"{name} tensor cores, two planes"
