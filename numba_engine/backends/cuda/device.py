"""What the CUDA backend needs of a device: memory and launches. A real GPU and the PTX executor both provide it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from numba_engine.backends.capture import Graph, Pending

if TYPE_CHECKING:
    from numba_engine.backends.cuda.compiler import Kernel


class DeviceArray(Protocol):
    """Memory of a device, C-contiguous."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def nbytes(self) -> int: ...
    def reshape(self, *shape: int) -> DeviceArray:
        """The same memory in another shape of as many elements."""
        ...

    def view(self, dtype: Any) -> DeviceArray:
        """The same memory, in one dimension, as elements of another type."""
        ...

    def __getitem__(self, rows: slice, /) -> DeviceArray:
        """Consecutive rows, in the same memory."""
        ...


Grid: TypeAlias = int | tuple[int, int] | tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    free_bytes: int
    total_bytes: int


class Device(Protocol):
    """Launches are asynchronous and run in order; ``download`` and ``synchronize`` wait for them.

    Arrays given to a device are its own: of the class that its ``empty`` returns.
    """

    name: str
    compute_capability: tuple[int, int]
    multiprocessors: int

    def empty(self, shape: tuple[int, ...], dtype: Any, name: str = "") -> DeviceArray:
        """Uninitialised memory. The name appears in reports and errors. Raises OutOfMemoryError with the numbers."""
        ...

    def upload(self, host: np.ndarray, name: str = "") -> DeviceArray:
        """A copy on the device. The host array may be reused at once."""
        ...

    def write(self, array: Any, host: np.ndarray) -> None:
        """Overwrite the array with a host array of its shape and dtype, in order with the launches."""
        ...

    def download(self, array: Any) -> np.ndarray:
        """A host copy, once the launches before are done."""
        ...

    def download_later(self, array: Any) -> Pending:
        """Start a download, in order with the launches, and do not wait for it."""
        ...

    def free(self, array: Any) -> None:
        """Give the memory back, once the launches before are done. The array must not be used again."""
        ...

    def launch(
        self,
        kernel: Kernel,
        grid: Grid,
        arguments: Sequence[Any],
        *,
        shared_bytes: int = 0,
        cooperative: bool = False,
    ) -> None:
        """Run ``grid`` blocks of ``kernel.threads`` threads with ``shared_bytes`` of dynamic shared memory.

        An argument is a DeviceArray or a number; what the ABI makes of an array is the device's business. The kernel is
        compiled for this device on first use. ``cooperative`` promises that all blocks are resident at once, which
        kernels that wait for one another across blocks need.
        """
        ...

    def capture(self) -> AbstractContextManager[Graph]:
        """Capture the launches inside the block instead of running them; a replay of the graph runs them, as one.

        Their arguments are fixed; the contents of their arrays are those of the time they run. The memory they use
        lives as long as the graph. Copies and waiting cannot be captured: inside the block they raise RuntimeError.
        """
        ...

    def synchronize(self) -> None:
        """Wait for all launches."""
        ...

    def memory_info(self) -> MemoryInfo: ...
