"""A file mapped read-only into memory, whose pages can be given back."""

from __future__ import annotations

import mmap
import os
import stat
from contextlib import suppress
from pathlib import Path

import numpy as np

from numba_engine.errors import CheckpointError


class MappedFile:
    """A regular, non-empty file as memory. Views of it share its pages: nothing is read before it is touched.

    Raises:
        CheckpointError: the file cannot be read, is not a regular file, or is empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # Asked before opening: opening a pipe would wait for its other end.
            if not stat.S_ISREG(path.stat().st_mode):
                raise CheckpointError("is not a regular file", file=str(path))
            with path.open("rb") as file:
                self.size = os.fstat(file.fileno()).st_size
                if self.size == 0:
                    raise CheckpointError("is empty", file=str(path))
                self.memory = mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"cannot be read: {error.strerror or error}", file=str(path)) from None
        self._bytes = np.frombuffer(self.memory, dtype=np.uint8)

    def view(self, start: int, num_bytes: int) -> np.ndarray:
        """uint8 ``[num_bytes]`` from ``start``, not copied; the caller has checked the range."""
        assert 0 <= start <= start + num_bytes <= self.size
        return self._bytes[start : start + num_bytes]

    def release(self, view: np.ndarray) -> None:
        """Give a view's pages back to the system. The view stays good: touched again, it is read again."""
        if not hasattr(mmap, "MADV_DONTNEED") or view.size == 0:
            return
        start = view.__array_interface__["data"][0] - self._bytes.__array_interface__["data"][0]
        assert 0 <= start <= start + view.nbytes <= self.size, "not a view of this file"
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        self.memory.madvise(mmap.MADV_DONTNEED, first, start + view.nbytes - first)

    def close(self) -> None:
        """Unmap the file: at once, or with the last view of it."""
        self._bytes = np.empty(0, dtype=np.uint8)
        with suppress(BufferError):
            self.memory.close()
