"""Commands: what ops do, as compiled functions of addresses and numbers, run at once or noted and run again as a graph.

A command prepares jobs for the thread team and runs them. A call of it lies in memory as its address, the number of its
arguments, and these, one word each; any number of calls, one behind the other, is one call from Python.
"""

from __future__ import annotations

import functools
import inspect
import struct
from collections.abc import Callable

import numpy as np
from numba import carray

from numba_engine.backends.cpu.compilation import inner, kernel_address, launcher
from numba_engine.backends.cpu.intrinsics import call_command, load_arguments, load_i64, pointer_i64
from numba_engine.backends.cpu.thread_team import STATE_WORDS

_CODES = {"int": "q", "float": "d"}  # of ``struct``, by annotation


class Command:
    """A function of the team's state, ints and floats, compiled when it is first called."""

    def __init__(self, function: Callable[..., None]) -> None:
        _, *parameters = inspect.signature(function).parameters.values()
        self._function = function
        self._codes = "".join(_CODES[parameter.annotation] for parameter in parameters)
        self._call = struct.Struct(f"qq{self._codes}")

    def call(self, *args: float) -> bytes:
        """A call of it, as it lies in memory."""
        return self._call.pack(self._address, len(args), *args)

    def write_call(self, memory: bytearray, *args: float) -> int:
        """Write a call of it; its bytes."""
        self._call.pack_into(memory, 0, self._address, len(args), *args)
        return self._call.size

    @functools.cached_property
    def _address(self) -> int:
        function, arguments = inner(self._function), load_arguments(self._codes)

        def command(team: int, args: int) -> None:
            function(carray(pointer_i64(team), (STATE_WORDS,)), *arguments(args))

        return kernel_address(command, "void(int64, int64)", self._function.__name__)


@launcher
def run_calls(team: int, begin: int, end: int) -> None:
    """Run the calls that lie from one address to another."""
    while begin < end:
        call_command(load_i64(begin, 0), team, begin + 16)
        begin += 16 + 8 * load_i64(begin, 1)


class CpuGraph:
    """Calls of commands, noted while ops ran."""

    def __init__(self, team: int) -> None:
        self.num_launches = 0
        self._team = team
        self._calls = bytearray()
        self._scratch: dict[int, np.ndarray] = {}

    def note(self, call: bytes) -> None:
        self.num_launches += 1
        self._calls += call

    def keep(self, scratch: np.ndarray) -> None:
        """Memory that the calls use, and the backend may replace by more."""
        self._scratch[id(scratch)] = scratch

    def replay(self) -> None:
        run_calls(self._team, *self._bounds)

    @functools.cached_property
    def _bounds(self) -> tuple[int, int]:
        calls = np.frombuffer(self._calls, np.uint8)
        self.keep(calls)  # while it lives, the bytes cannot grow and so not move
        begin = calls.ctypes.data
        return begin, begin + calls.size
