"""Commands: what ops do, as compiled functions of words, called at once or noted and called again as a graph.

A command prepares jobs for the thread team and runs them. Its words are numbers and addresses of arrays. In a graph a
call lies in memory as the command's address, the number of its words, and these; calls lie one behind the other.
"""

from __future__ import annotations

import functools
import inspect
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray

from numba_engine.backends.cpu.compilation import inner, kernel_address, launcher
from numba_engine.backends.cpu.intrinsics import call_command, load_i64, load_words, pointer_i64, words_of
from numba_engine.backends.cpu.thread_team import STATE_WORDS

_CODES = {"int": "q", "float": "d"}  # of ``struct``, by annotation


class Command:
    """A function of the team's state and of words, ints and floats, compiled when it is first called.

    In the place of an int, a caller may give an array, which stands for its address, or None for 0.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        _, *words = inspect.signature(function).parameters.values()
        self._name = function.__name__
        self._codes = "".join(_CODES[word.annotation] for word in words)
        self._function = inner(function)
        self._packed = struct.Struct(f"qq{self._codes}")

    @functools.cached_property
    def call(self) -> Callable[..., None]:
        """Call it from Python: call(address of the team's state, *words)."""
        function = self._function

        def call(team: int, *words: Any) -> None:
            function(carray(pointer_i64(team), (STATE_WORDS,)), *words_of(words))

        return launcher(call, self._name)

    def packed(self, words: tuple[Any, ...]) -> bytes:
        """A call as it lies in a graph."""
        return self._packed.pack(self._address, len(words), *map(_word, words))

    @functools.cached_property
    def _address(self) -> int:
        function, load = self._function, load_words(self._codes)

        def call_packed(team: int, words: int) -> None:
            function(carray(pointer_i64(team), (STATE_WORDS,)), *load(words))

        return kernel_address(call_packed, "void(int64, int64)", self._name)


def _word(value: Any) -> float:
    if value is None:
        return 0
    return value.ctypes.data if isinstance(value, np.ndarray) else value


class CpuGraph:
    """Calls of commands, noted while ops were captured, and the arrays they work on."""

    def __init__(self, team: int) -> None:
        self.num_launches = 0
        self._team = team
        self._calls = bytearray()
        self._arrays: dict[int, np.ndarray] = {}

    def note(self, command: Command, words: tuple[Any, ...]) -> None:
        self.num_launches += 1
        self._calls += command.packed(words)
        self._arrays.update((id(word), word) for word in words if isinstance(word, np.ndarray))

    def replay(self) -> None:
        run_calls(self._team, *self._bounds)

    @functools.cached_property
    def _bounds(self) -> tuple[int, int]:
        """Where its calls begin and end. No more are noted from now on."""
        calls = self._arrays[0] = np.frombuffer(self._calls, np.uint8)
        begin = calls.ctypes.data
        return begin, begin + calls.size


@launcher
def run_calls(team: int, begin: int, end: int) -> None:
    """Make the calls that lie from one address to another."""
    while begin < end:
        call_command(load_i64(begin, 0), team, begin + 16)
        begin += 16 + 8 * load_i64(begin, 1)
