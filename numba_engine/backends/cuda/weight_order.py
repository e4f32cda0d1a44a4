"""WeightOrder: which weight is streamed after which, so that a kernel can have the next one's beginning fetched."""

from __future__ import annotations

import weakref

from numba_engine.backends.arrays import Weight
from numba_engine.backends.cuda.arrays import CudaArray


class WeightOrder:
    """Learnt from the order in which weights are first used; a forward pass takes them in the same one each time."""

    def __init__(self) -> None:
        self._next: weakref.WeakKeyDictionary[CudaArray, weakref.ref[CudaArray]] = weakref.WeakKeyDictionary()
        self._last: weakref.ref[CudaArray] | None = None

    def use(self, weight: Weight) -> CudaArray | None:
        """Note that the weight is streamed now. Gives the memory that was streamed after it the first time."""
        memory = weight.segments[0].data
        assert isinstance(memory, CudaArray)
        last = None if self._last is None else self._last()
        if last is not None:
            self._next.setdefault(last, weakref.ref(memory))
        self._last = weakref.ref(memory)
        following = self._next.get(memory)
        return None if following is None else following()
