"""CudaBackend: the ops of ``Backend`` as launches on a Device, which is a GPU (``cuda``) or the executor (``ptx``)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from numba_engine.backends.arrays import Array, Batch, Segment, Weight
from numba_engine.backends.capture import CaptureBackend, Graph, Pending
from numba_engine.backends.cuda.arrays import CudaArray, flat, on_device
from numba_engine.backends.cuda.device import Device, Grid
from numba_engine.backends.cuda.kernels import advance, read_bandwidth
from numba_engine.backends.cuda.kernels.packing import looked_up_row_bytes, pack
from numba_engine.backends.cuda.weight_order import WeightOrder
from numba_engine.backends.kernels import Kernels
from numba_engine.backends.ops import Op
from numba_engine.backends.sampling import Sampling
from numba_engine.config import EngineConfig
from numba_engine.errors import BackendUnavailableError
from numba_engine.formats import StoredTensor

if TYPE_CHECKING:
    from numba_engine.backends.cuda.compiler import Kernel

_READ_BYTES = 1 << 30
"""Enough to be larger than any cache; less where it already takes long."""
_READ_LONG_ENOUGH_S = 1e-3


class CudaBackend(CaptureBackend):
    """Runs the ops by the kernels of ``cuda/kernels``, in order on one stream.

    Activations are float32. Quantised weights are multiplied with two planes of int8, as on the CPU, whatever
    ``activation_dtype`` says: tensor cores take nothing better that is as fast.
    """

    num_threads = 0
    activation_dtype = np.dtype(np.float32)
    quantized_matmul_dtype = "int8"
    kv_cache_share = 0.9  # what is left is for activations, and for what else the driver keeps

    def __init__(self, device: Device, config: EngineConfig, *, name: str) -> None:
        self.name = name
        self.device = device
        self.device_name = device.name
        is_float32 = config.kv_cache_dtype == "float32" or (
            config.kv_cache_dtype == "auto" and config.activation_dtype == "float32"
        )
        self.kv_cache_dtype = np.dtype(np.float32 if is_float32 else np.float16)
        self._kernels = Kernels("numba_engine.backends.cuda.kernels", fusion=config.fusion)
        self._order = WeightOrder()
        self._counts = self.upload(np.zeros((1, 1), np.uint32))
        self._arrivals = self.upload(np.zeros(64 * config.max_num_seqs, np.uint32))

    # ---- memory ------------------------------------------------------------------------------------------------------

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> CudaArray:
        return CudaArray.owning(self.device, self.device.empty(shape, dtype))

    def upload(self, host: np.ndarray) -> CudaArray:
        return CudaArray.owning(self.device, self.device.upload(np.ascontiguousarray(host)))

    def download(self, array: Array) -> np.ndarray:
        return self.device.download(on_device(array))

    def write(self, array: Array, host: np.ndarray) -> None:
        self.device.write(on_device(array), host)

    def download_later(self, array: Array) -> Pending:
        return self.device.download_later(on_device(array))

    def load_weight(self, name: str, tensors: Sequence[StoredTensor]) -> Weight:
        in_features = tensors[0].shape[1]
        if in_features % 4:
            raise BackendUnavailableError(
                f"{name} has {in_features} columns; backend {self.name} takes multiples of 4. Use backend cpu."
            )
        segments = []
        for format, group in groupby(tensors, key=lambda tensor: tensor.format):
            parts = [np.asarray(tensor.data) for tensor in group]
            data = parts[0] if len(parts) == 1 else np.concatenate(parts)
            packed = CudaArray.owning(self.device, self.device.upload(pack(format, data, in_features), name))
            row_bytes = looked_up_row_bytes(format, in_features)
            segments.append(Segment(format, len(data), packed.nbytes, packed, row_bytes))
        return Weight(name, (sum(segment.num_rows for segment in segments), in_features), tuple(segments))

    def synchronize(self) -> None:
        self.device.synchronize()

    def capture(self) -> AbstractContextManager[Graph]:
        return self.device.capture()

    def free_memory_bytes(self) -> int:
        return self.device.memory_info().free_bytes

    def read_bandwidth_gbps(self) -> float:
        nbytes, taken_s = 1 << 20, 0.0
        while taken_s < _READ_LONG_ENOUGH_S and nbytes < min(_READ_BYTES, self.free_memory_bytes() // 4):
            nbytes *= 4
            taken_s = self._time_to_read(nbytes)
        return nbytes / taken_s / 1e9 if taken_s else 0.0

    def _time_to_read(self, nbytes: int) -> float:
        """The best of three passes, by the host's clock around a synchronised launch."""
        data = self.empty((nbytes // 4,), np.dtype(np.uint32))
        times = []
        for _ in range(4):  # the first one compiles and warms up
            self.device.synchronize()
            start = time.perf_counter()
            read_bandwidth.launch(self, data)
            self.device.synchronize()
            times.append(time.perf_counter() - start)
        return min(times[1:])

    # ---- running ops ------------------------------------------------------------------------------------------------

    def run(self, op: Op, args: tuple[Any, ...]) -> Any:
        return self._kernels.run(self, op, args)

    def fuses(self, op: Op) -> bool:
        return self._kernels.has(op)

    def advance(self, batch: Batch, sampling: Sampling, token_ids: Array, block_size: int) -> None:
        advance.launch(self, batch, sampling, token_ids, block_size)

    # ---- what launches ask for ---------------------------------------------------------------------------------------

    def launch(self, kernel: Kernel, grid: Grid, arguments: Sequence[Any], *, shared_bytes: int = 0) -> None:
        """Run a kernel; its arguments are numbers, and arrays, which it takes in one dimension."""
        flattened = [flat(argument) if isinstance(argument, CudaArray) else argument for argument in arguments]
        self.device.launch(kernel, grid, flattened, shared_bytes=shared_bytes)

    def next_weights(self, weight: Weight) -> CudaArray | None:
        """What is streamed after this weight, which is streamed now: a kernel asks L2 for its beginning."""
        return self._order.use(weight)

    def zero_arrivals(self, count: int) -> CudaArray:
        """uint32 [≥ count] of zeros, kept: kernels leave them zero."""
        if self._arrivals.shape[0] < count:
            self._arrivals = self.upload(np.zeros(count, np.uint32))
        return self._arrivals

    def zero_counts(self, rows: int, vocab: int) -> CudaArray:
        """uint32 [≥ rows, vocab] of zeros, kept: the kernel leaves them zero."""
        if self._counts.shape[0] < rows or self._counts.shape[1] != vocab:
            self._counts = self.upload(np.zeros((rows, vocab), np.uint32))
        return self._counts
