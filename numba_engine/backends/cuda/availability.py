"""Is there a GPU that the CUDA backend can use? Asked of the driver itself, without importing CuPy."""

from __future__ import annotations

import ctypes
import importlib.util
from functools import cache

from numba_engine.errors import BackendUnavailableError

LEAST_COMPUTE_CAPABILITY = (8, 0)
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, …_MINOR
_INSTALL = "pip install -e '.[cuda13]' (or [cuda12], by the driver's CUDA version)"


def require_gpu() -> tuple[int, int]:
    """The compute capability of GPU 0.

    Raises:
        BackendUnavailableError: no driver, no GPU, too old a GPU, or Python packages missing; with what to install.
    """
    major, minor = _compute_capability()
    if (major, minor) < LEAST_COMPUTE_CAPABILITY:
        raise BackendUnavailableError(
            f"backend cuda needs compute capability {_dotted(LEAST_COMPUTE_CAPABILITY)} or newer (Ampere);"
            f" this GPU has {major}.{minor}. Use backend cpu."
        )
    require_packages("cuda", ("numba_cuda", "cupy"), _INSTALL)
    return major, minor


def require_packages(backend: str, packages: tuple[str, ...], install: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise BackendUnavailableError(f"backend {backend} needs the Python package {' and '.join(missing)}: {install}")


def why_no_gpu() -> str | None:
    """None if ``require_gpu`` passes, else what it says."""
    try:
        require_gpu()
    except BackendUnavailableError as error:
        return str(error)
    return None


@cache
def _compute_capability() -> tuple[int, int]:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise BackendUnavailableError(
            "backend cuda needs an NVIDIA GPU and its driver; libcuda.so.1 was not found."
            " Use backend cpu, or ptx to run the GPU kernels without a GPU."
        ) from error
    count = ctypes.c_int()
    if (status := driver.cuInit(0)) or (status := driver.cuDeviceGetCount(ctypes.byref(count))):
        raise BackendUnavailableError(f"the NVIDIA driver answers with error {status}; nvidia-smi may say more")
    if count.value == 0:
        raise BackendUnavailableError("the NVIDIA driver sees no GPU; is CUDA_VISIBLE_DEVICES set to none?")
    device, numbers = ctypes.c_int(), (ctypes.c_int(), ctypes.c_int())
    driver.cuDeviceGet(ctypes.byref(device), 0)
    for number, attribute in zip(numbers, (_MAJOR, _MINOR), strict=True):
        driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
    return numbers[0].value, numbers[1].value


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
