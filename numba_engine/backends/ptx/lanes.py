"""Which lanes execute: a mask over [blocks, threads], and what it means for values that are held once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from numba_engine.backends.ptx.operands import BLOCK, THREAD


@dataclass(slots=True, eq=False)
class Live:
    """The lanes of the batch that have not exited; shared by all masks of the batch."""

    mask: Mask | None = None


class Mask:
    """Lanes that execute together. Immutable; what derives from it is computed once."""

    __slots__ = ("_full_blocks", "_reduced", "_selected", "_selected_for", "_warps", "array", "count", "live")

    def __init__(self, array: np.ndarray, live: Live) -> None:
        self.array = array
        self.count = int(np.count_nonzero(array))
        self.live = live
        self._reduced: dict[int, np.ndarray] = {}
        self._selected: dict[int, np.ndarray | None] = {}
        self._selected_for: Mask | None = None
        self._warps: int | None = None

    @property
    def flat(self) -> np.ndarray:
        return self.array.reshape(-1)

    @property
    def warps(self) -> int:
        """Warps with at least one active lane."""
        if self._warps is None:
            self._warps = int(np.count_nonzero(self.array.reshape(-1, 32).any(axis=1)))
        return self._warps

    def reduced(self, bits: int) -> np.ndarray:
        """Any active lane, for every element of an array of that shape."""
        if bits == BLOCK | THREAD:
            return self.array
        if bits not in self._reduced:
            axis = {0: None, BLOCK: 1, THREAD: 0}[bits]
            self._reduced[bits] = np.asarray(self.array.any(axis=axis, keepdims=True))
        return self._reduced[bits]

    def select(self, bits: int) -> np.ndarray | None:
        """The elements an arithmetic result may be written to; None where writing all of them does no harm.

        Lanes that have exited never read again, so their elements are free.
        """
        live = self.live.mask
        assert live is not None
        if self.count == live.count or bits == 0:
            return None
        if self._selected_for is not live:
            self._selected = {}
            self._selected_for = live
        if bits not in self._selected:
            own = self.reduced(bits)
            covers = bits != BLOCK | THREAD and np.array_equal(own, live.reduced(bits))
            self._selected[bits] = None if covers else own
        return self._selected[bits]

    def narrow(self, predicate: np.ndarray, negated: bool) -> Mask:
        """The lanes where the predicate holds (does not hold)."""
        if predicate.size == 1:
            return self if bool(predicate[0, 0]) != negated else Mask(np.zeros_like(self.array), self.live)
        return Mask((np.greater if negated else np.logical_and)(self.array, predicate), self.live)

    def without(self, other: Mask) -> Mask:
        return Mask(np.greater(self.array, other.array), self.live)

    def union(self, other: Mask) -> Mask:
        return Mask(np.logical_or(self.array, other.array), self.live)
